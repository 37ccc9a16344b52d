"""Attention over earlier blocks: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.block_residual import STATE_EPS, read_blocks

ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(5, 1, 24, 1), (3, 8, 48, 3), (2, 4, 1030, 2)] + ([(300, 8, 4608, 3)] if ON_GPU else [])
"""Tokens, blocks, width, queries."""


def by_hand(blocks: Tensor, latest: Tensor, queries: Tensor, weights: Tensor, eps: float) -> Tensor:
    """In float64, token by token and query by query."""
    out = torch.empty(len(queries), *latest.shape, dtype=torch.float64, device=latest.device)
    for t in range(len(latest)):
        states = [*blocks[t].double(), latest[t].double()]
        normed = torch.stack([s / (s.square().mean() + STATE_EPS).sqrt() for s in states])
        for i, (query, weight) in enumerate(zip(queries.double(), weights.double(), strict=True)):
            read = (normed @ query / latest.shape[1] ** 0.5).softmax(0) @ normed
            out[i, t] = read / (read.square().mean() + eps).sqrt() * weight
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_every_query_reads_all_states(shape: tuple[int, ...], dtype: torch.dtype, wide: bool) -> None:
    """The latest state may be in float32, and its rows may be strided. Some states are large, and one is zero."""
    rows, count, width, num_queries = shape
    blocks = (torch.randn(rows, count, width, device=DEVICE) * torch.rand(rows, count, 1, device=DEVICE) * 50).to(dtype)
    blocks[0, 0] = 0.0
    latest = torch.randn(rows, 2, width, device=DEVICE).to(torch.float32 if wide else dtype)[:, 1]
    queries = 3.0 * torch.randn(num_queries, width, device=DEVICE)
    weights = (1.0 + 0.3 * torch.randn(num_queries, width, device=DEVICE)).to(dtype)
    want = by_hand(blocks, latest, queries, weights, 1e-3)
    for backend in (Backend.TORCH, Backend.TRITON):
        got = read_blocks(blocks, latest, queries, weights, 1e-3, backend=backend)
        assert got.dtype == dtype and got.shape == want.shape
        assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max(), backend


def test_no_rows() -> None:
    blocks, latest = torch.empty(0, 2, 8, device=DEVICE), torch.empty(0, 8, device=DEVICE)
    ones = torch.ones(1, 8, device=DEVICE)
    for backend in (Backend.TORCH, Backend.TRITON):
        assert read_blocks(blocks, latest, ones, ones, 1e-6, backend=backend).shape == (1, 0, 8)
