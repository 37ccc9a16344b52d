"""The fused all-reduce: ranks in processes of their own, under Triton's interpreter, in shared memory."""

from __future__ import annotations

import os
import sys
import traceback

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from weft.ops.all_reduce import all_reduce_rms_norm, all_reduce_rms_norm_reference
from weft.ops.peer_buffers import PeerBuffers, buffer_bytes, make_counters
from weft.ops.triton.all_reduce_packed import fits_packed

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/multi_gpu has the same on GPUs")

WIDTH = 40
NUM_PROGRAMS = 4
MOST_ROWS = 14 * NUM_PROGRAMS
ROWS = (1, 3, 2 * NUM_PROGRAMS + 1, 2, 13 * NUM_PROGRAMS + 2)


def test_few_rows_go_by_packets() -> None:
    """As many as there is room for between two ranks, fewer between more; never half a packet."""
    weight = torch.zeros(2048, dtype=torch.bfloat16)
    fits = {
        (rows, size): fits_packed(torch.zeros(rows, 2048, dtype=torch.bfloat16), None, weight, size)
        for rows in (32, 33, 128, 129)
        for size in (2, 4)
    }
    assert [key for key, found in fits.items() if found] == [(32, 2), (32, 4), (33, 2), (128, 2)]
    assert not fits_packed(torch.zeros(1, 3, dtype=torch.bfloat16), None, weight[:3], 2)


def run_rank(rank: int, size: int, buffers: list[Tensor], inputs: Tensor, results: Tensor) -> None:
    """One exchange after the other, each with another number of rows."""
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
    peers = PeerBuffers(addresses, make_counters(addresses.device), rank, size, WIDTH, MOST_ROWS)
    residual, weight = inputs[0, 0].clone(), inputs[0, 1, 0]
    for i, rows in enumerate(ROWS):
        first = i == 0
        y, residual_out = all_reduce_rms_norm(
            inputs[rank, 2, :rows], None if first else residual[:rows], weight, 1e-6, peers, zero_centered=bool(i % 2)
        )
        results[rank, i, 0, :rows], results[rank, i, 1, :rows] = y, residual_out


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_ranks_sum_add_and_normalise(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of each program goes by packets, more with a barrier."""
    for module in ("weft.ops.peer_buffers", "weft.ops.triton.all_reduce", "weft.ops.triton.all_reduce_packed"):
        monkeypatch.setattr(f"{module}.MAX_PROGRAMS", NUM_PROGRAMS)
    monkeypatch.setattr("weft.ops.triton.all_reduce._TILE_VALUES", 4 * 64)  # tiles of four rows
    num_bytes = buffer_bytes(size, WIDTH, dtype, MOST_ROWS)
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    inputs = torch.randn(size, 3, max(ROWS), WIDTH).to(dtype).share_memory_()
    results = torch.full((size, len(ROWS), 2, max(ROWS), WIDTH), torch.nan, dtype=dtype).share_memory_()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6  # rounded twice, an ulp of up to 2**-7 each time
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, size, buffers, inputs, results)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    for i, rows in enumerate(ROWS):
        parts = [inputs[rank, 2, :rows] for rank in range(size)]
        residual = None if i == 0 else inputs[0, 0, :rows]
        want = all_reduce_rms_norm_reference(parts, residual, inputs[0, 1, 0], 1e-6, zero_centered=bool(i % 2))
        for rank in range(size):
            torch.testing.assert_close(results[rank, i, 0, :rows], want[0], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(results[rank, i, 1, :rows], want[1], rtol=tolerance, atol=tolerance)
            assert torch.equal(results[rank, i, :, :rows], results[0, i, :, :rows]), "ranks disagree"
            assert results[rank, i, :, rows:].isnan().all()
