"""Gated residual streams: both implementations against plain definitions in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import covering
from weft.ops.backend import Backend

from weft.ops.streams.gated import add_to_streams, mean_of_gated, norm_streams, silu_of_mean  # isort: skip

ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
WAYS = [(Backend.TORCH, torch.float32), *((Backend.TRITON, dtype) for dtype in DTYPES)]
"""The reference rounds as torch does, so only float32 is exact there."""
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest value: a rounding of the result."""
SHAPES = [(5, 4, 24), (1, 3, 1030), (70, 2, 8)] + ([(300, 4, 2048)] if ON_GPU else [])
CASES = covering(SHAPES, WAYS, of=1)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
    assert (got.double() - want).abs().max().item() <= BOUND[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.parametrize(("shape", "way"), CASES, ids=str)
def test_norms_of_streams(shape: tuple[int, int, int], way: tuple[Backend, torch.dtype]) -> None:
    """Streams that are one stream repeated without copies, as in the first layer, are read too."""
    (backend, dtype), count = way, shape[1]
    weight = random(count * shape[2], dtype=dtype)
    streams = random(*shape, dtype=dtype)
    for given in (streams, streams[:, :1].expand(-1, count, -1)):
        for centred in (False, True):
            wide = given.double()
            normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            want = normed * (weight.double().view(count, -1) + (1.0 if centred else 0.0))
            check(norm_streams(given, weight, 1e-3, zero_centered=centred, backend=backend), want, dtype)


@pytest.mark.parametrize(("shape", "way"), CASES, ids=str)
def test_gates(shape: tuple[int, int, int], way: tuple[Backend, torch.dtype]) -> None:
    """Products are padded, so rows of gates are wider than the streams."""
    (rows, count, width), (backend, dtype) = shape, way
    down = random(rows, 37, dtype=dtype)
    means = down[:, :20].double() / count
    check(silu_of_mean(down, 20, count, backend=backend), means * means.sigmoid(), dtype)
    streams, gates = random(*shape, dtype=dtype), random(rows, count * width + 5, dtype=dtype)
    shares = gates[:, : count * width].double().sigmoid().view(shape)
    check(mean_of_gated(streams, gates, backend=backend), (shares * streams.double()).mean(1), dtype)


@pytest.mark.parametrize(("shape", "way"), CASES, ids=str)
def test_additions(shape: tuple[int, int, int], way: tuple[Backend, torch.dtype]) -> None:
    (rows, count, width), (backend, dtype) = shape, way
    logits = random(rows, 30, dtype=dtype)[:, 7 : 7 + count]
    streams, output = random(*shape, dtype=dtype), random(rows, width + 3, dtype=dtype)[:, :width]
    for given in (streams, streams[:, :1].expand(-1, count, -1)):
        shares = 2.0 * (logits.double() / count).sigmoid()
        want = given.double() + shares[..., None] * output.double()[:, None]
        check(add_to_streams(given, output, logits, backend=backend), want, dtype)
