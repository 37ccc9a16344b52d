"""Residual streams: what the definition promises, and the kernels against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import covering
from weft.ops.backend import Backend

from weft.ops.streams import read_streams, write_streams  # isort: skip

ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(5, 4, 24), (1, 3, 1030), (70, 2, 8)] + ([(300, 4, 4096)] if ON_GPU else [])
OPTIONS: dict[str, Any] = {"norm_eps": 1e-5, "eps": 1e-6, "iterations": 20}


def inputs_of(rows: int, count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    size = 2 * count + count * count
    streams = torch.randn(rows, count, width, device=DEVICE).to(dtype)
    others = (torch.randn(*shape, device=DEVICE) for shape in ((rows, size), (3,), (size,)))
    return streams, *others


@pytest.mark.parametrize(("shape", "dtype"), covering(SHAPES, DTYPES, of=1), ids=str)
def test_kernels(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Streams that are one stream repeated without copies, as in the first layer, are read too."""
    streams, *others = inputs_of(*shape, dtype)
    options = OPTIONS | ({"eps": 0.0} if shape[0] == 1 else {})
    for given in (streams, streams[:, :1].expand(-1, shape[1], -1)):
        want = read_streams(given, *others, **options, backend=Backend.TORCH)
        got = read_streams(given, *others, **options, backend=Backend.TRITON)
        output = torch.randn(shape[0], shape[2], device=DEVICE).to(dtype)
        written = (write_streams(given, output, want[1], backend=b) for b in (Backend.TORCH, Backend.TRITON))
        for a, b in ((want[0], got[0]), (want[1], got[1]), tuple(written)):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert (a.float() - b.float()).abs().max().item() <= TOLERANCE[dtype] * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
def test_the_matrix_keeps_the_sum_of_the_streams(backend: Backend) -> None:
    """Rows and columns sum to one, so mixing changes no sum over streams; every stream gets its share of the output."""
    streams, *others = inputs_of(6, 4, 16, torch.float32)
    _, weights = read_streams(streams, *others, **OPTIONS, backend=backend)
    post, matrix = weights.split([4, 16], dim=-1)
    assert (matrix.unflatten(-1, (4, 4)).sum(1) - 1).abs().max().item() < 1e-4
    nothing = torch.zeros(6, 16, device=DEVICE)
    mixed = write_streams(streams, nothing, weights, backend=backend)
    wanted = torch.einsum("tmn,tmh->tnh", matrix.unflatten(-1, (4, 4)), streams)
    torch.testing.assert_close(mixed, wanted, atol=1e-5, rtol=1e-5)
    added = write_streams(streams * 0, torch.ones_like(nothing), weights, backend=backend)
    torch.testing.assert_close(added, post[..., None].expand(-1, -1, 16), atol=1e-5, rtol=1e-5)
