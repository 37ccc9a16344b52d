"""The fused all-reduce: ranks in processes of their own, under Triton's interpreter, in shared memory."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import unless_long
from weft.ops.collectives import all_reduce_rms_norm, all_reduce_rms_norm_reference
from weft.ops.collectives.packed import fits_packed
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows, buffer_bytes, make_counters
from weft.ops.linear import skinny as skinny_linear
from weft.ops.linear.skinny_choice import Config
from weft.ops.moe import Routed
from weft.ops.moe import combine as moe_sum

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/multi_gpu has the same on GPUs")

WIDTH = 40
NUM_PROGRAMS = 4
MOST_ROWS = 14 * NUM_PROGRAMS
ROWS = (1, 3, 2 * NUM_PROGRAMS + 1, 2, 13 * NUM_PROGRAMS + 2, 4, 1, 2)


def test_few_rows_go_by_packets() -> None:
    """Two ranks send the rows that there is room for, and more ranks send fewer. Half a packet is never sent."""
    weight = torch.zeros(2048, dtype=torch.bfloat16)
    fits = {
        (rows, size): fits_packed(torch.zeros(rows, 2048, dtype=torch.bfloat16), None, weight, size)
        for rows in (32, 33, 128, 129)
        for size in (2, 4)
    }
    assert [key for key, found in fits.items() if found] == [(32, 2), (32, 4), (33, 2), (128, 2)]
    assert not fits_packed(torch.zeros(1, 3, dtype=torch.bfloat16), None, weight[:3], 2)


def as_they_are(x: Tensor, peers: PeerBuffers) -> Tensor:
    return x


def in_parts(x: Tensor, peers: PeerBuffers) -> Tensor:
    return torch.stack([x.float() / 4, x.float() / 4, x.float() / 2])


def sent_by_a_product(x: Tensor, peers: PeerBuffers) -> Tensor | SentRows:
    """Send the product of rows of the identity and a matrix whose columns are the rows of ``x``."""
    if x.shape[0] > NUM_PROGRAMS:
        return x
    weight = torch.zeros(WIDTH, 64, dtype=x.dtype)
    weight[:, : x.shape[0]] = x.T
    return skinny_linear.linear_parts_triton(torch.eye(64, dtype=x.dtype)[: x.shape[0]], weight, peers)


def sent_by_experts(x: Tensor, peers: PeerBuffers) -> Tensor | SentRows:
    """Send outputs of experts. Each token has one expert, of weight 1, and one empty choice."""
    if x.shape[0] > NUM_PROGRAMS:
        return x
    partial = torch.stack([x, torch.full_like(x, torch.nan)], dim=1).flatten(0, 1)
    ids = torch.tensor([[3, -1]] * x.shape[0], dtype=torch.int32)
    return moe_sum.send_experts(partial, Routed(torch.ones(ids.shape), ids), peers)


FORMS = (as_they_are, in_parts, sent_by_a_product, sent_by_experts)


def run_rank(
    rank: int, size: int, buffers: list[Tensor], inputs: Tensor, results: Tensor, forms: tuple[Any, ...]
) -> None:
    """Run one exchange after another, each with a different number of rows. If there are several forms, the ranks of
    an exchange use different forms."""
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
    peers = PeerBuffers(addresses, make_counters(addresses.device), rank, size, WIDTH, MOST_ROWS)
    residual, weight = inputs[0, 0].clone(), inputs[0, 1, 0]
    for i, rows in enumerate(ROWS):
        first = i == 0
        x = forms[(i + rank) % len(forms)](inputs[rank, 2, :rows], peers)
        assert isinstance(x, SentRows) == (rows <= NUM_PROGRAMS and forms[(i + rank) % len(forms)] in FORMS[2:])
        y, residual_out = all_reduce_rms_norm(
            x, None if first else residual[:rows], weight, 1e-6, peers, zero_centered=bool(i % 2)
        )
        results[rank, i, 0, :rows], results[rank, i, 1, :rows] = y, residual_out


@pytest.mark.parametrize(
    ("size", "dtype"), unless_long([(3, torch.float32)], [(2, torch.bfloat16), (3, torch.float32)])
)
def test_ranks_sum_add_and_normalise(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of each program goes by packets, more with a barrier. In whatever form a rank's part comes, the bits are
    the same."""
    for module in (
        "weft.ops.collectives.peer_buffers",
        "weft.ops.collectives.signalled",
        "weft.ops.collectives.packets",
    ):
        monkeypatch.setattr(f"{module}.MAX_PROGRAMS", NUM_PROGRAMS)
    monkeypatch.setattr("weft.ops.collectives.signalled._TILE_VALUES", 4 * 64)  # tiles of four rows
    monkeypatch.setattr("weft.ops.collectives.packed._MOST_POLLS", 1 << 12)  # a test that fails ends
    monkeypatch.setattr(moe_sum, "TILES", {1 << 30: moe_sum.Tile(16, 1, None)})  # three programs for a row
    configs = {1: Config("sum", 4, 64, 1)}  # of more rows it is split
    others = Config("sum", 4, 32, 1, splits=2)
    monkeypatch.setattr(skinny_linear, "choose_config", lambda x, *_, **__: configs.get(len(x), others))
    inputs = torch.randn(size, 3, max(ROWS), WIDTH).to(dtype).share_memory_()
    plain, mixed = (exchanged(size, inputs, forms) for forms in (FORMS[:1], FORMS))
    assert torch.equal(plain.nan_to_num(9.0), mixed.nan_to_num(9.0))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6  # rounded twice, an ulp of up to 2**-7 each time
    for i, rows in enumerate(ROWS):
        parts = [inputs[rank, 2, :rows] for rank in range(size)]
        residual = None if i == 0 else inputs[0, 0, :rows]
        want = all_reduce_rms_norm_reference(parts, residual, inputs[0, 1, 0], 1e-6, zero_centered=bool(i % 2))
        for rank in range(size):
            torch.testing.assert_close(plain[rank, i, 0, :rows], want[0], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(plain[rank, i, 1, :rows], want[1], rtol=tolerance, atol=tolerance)
            assert torch.equal(plain[rank, i, :, :rows], plain[0, i, :, :rows]), "ranks disagree"
            assert plain[rank, i, :, rows:].isnan().all()


def exchanged(size: int, inputs: Tensor, forms: tuple[Any, ...]) -> Tensor:
    """Return the results of each rank, ``[size, exchanges, 2, rows, WIDTH]``."""
    dtype = inputs.dtype
    num_bytes = buffer_bytes(size, WIDTH, dtype, MOST_ROWS)
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    results = torch.full((size, len(ROWS), 2, max(ROWS), WIDTH), torch.nan, dtype=dtype).share_memory_()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, size, buffers, inputs, results, forms)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    return results
