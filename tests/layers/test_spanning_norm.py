"""Norms of channels that are split over simulated ranks equal the norm of all channels in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import model_context
from tests.layers.test_tensor_parallel import Group
from tests.ops.interpreter import DEVICE
from weft.forward_context import ForwardContext, forward_context
from weft.layers.norm import SpanningRMSNorm
from weft.layers.weight import split_rows
from weft.ops.backend import Backend

EPS = 0.3


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_ranks_form_one_norm(backend: Backend, size: int, gated: bool, zero_centered: bool) -> None:
    """The magnitude of the channels differs from rank to rank."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, gate, weight = (torch.randn(n, 90, generator=generator, device=DEVICE) for n in (7, 7, 1))
    x *= torch.arange(1, 91, device=DEVICE) / 60

    def run(group: Group) -> list[Tensor]:
        parts = []
        for rank in range(size):
            context = model_context(tp=group.rank(rank), device=DEVICE, backend=backend)
            norm = SpanningRMSNorm(split_rows([90], context.tp, "channels"), EPS, context, zero_centered=zero_centered)
            own = slice(rank * 90 // size, (rank + 1) * 90 // size)
            norm.weight.data.copy_(weight[0, own])
            batch: Any = None
            with torch.no_grad(), forward_context(ForwardContext(batch, {})):
                parts.append(norm(x[:, own], gate[:, own] if gated else None))
        return parts

    first = Group(size, [])
    run(first)
    got = torch.cat(run(Group(size, [torch.stack(terms).sum(0) for terms in zip(*first.summed, strict=True)])), -1)
    want = torch.nn.functional.rms_norm(x.double(), (90,), weight[0].double() + zero_centered, EPS)
    torch.testing.assert_close(got.double(), want * gate.double().sigmoid() if gated else want, rtol=3e-6, atol=1e-6)
