"""The last step of a mixture of experts: each token's weighted sum over its experts, in their order, and the gated
shared expert, in one launch that reads every expert's output once.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.collectives.packets import areas_of, flags_of, pack_values, route_to, send
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.moe import Routed
from weft.ops.triton.early_launch import Release, early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.tile_table import choose_tile


class Tile(NamedTuple):
    """Columns of one token per program, warps, and a limit on registers per thread.

    A generous limit is for speed: left alone, the compiler reads the experts' outputs a few at a time.
    """

    columns: int
    warps: int
    max_registers: int | None


# By number of tokens, see benchmarks/kernels/rows.py. Few tokens: narrow programs spread over the multiprocessors.
TILES = {64: Tile(256, 1, None), 1 << 30: Tile(1024, 4, 96)}


@jit
def _sum_kernel(
    partial, weights, ids, shared, shared_gate, out, addresses, counters, stride_shared, stride_gate, stride_out,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr, ROUTE: tl.constexpr, PASSES_ON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one token. Pairs without an expert (id -1) have no output: theirs is never read."""
    if not PASSES_ON:
        release(EARLY)
    areas = areas_of(addresses, ROUTE)
    wait(EARLY)
    if PASSES_ON:
        release(EARLY)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    flag = flags_of(counters, token, ROUTE)
    routed = ()
    for place in tl.static_range(TOP_K):  # all before the outputs, whose addresses wait for them
        routed = routed + (tl.load(ids + token * TOP_K + place) >= 0,)  # type: ignore[assignment]  # noqa: RUF005
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        value = tl.load(partial + pair * HIDDEN + columns, mask=inside & routed[place], other=0.0).to(tl.float32)
        acc += value * tl.where(routed[place], tl.load(weights + pair).to(tl.float32), 0.0)
    if SHARED:
        extra = tl.load(shared + token * stride_shared + columns, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            extra *= sigmoid(tl.load(shared_gate + token * stride_gate).to(tl.float32))
        acc += extra
    if ROUTE is None:
        tl.store(out + token * stride_out + columns, acc.to(out.dtype.element_ty), mask=inside)
    else:
        words = pack_values(acc, out.dtype.element_ty)
        places = tl.program_id(0) * words.shape[0] + tl.arange(0, words.shape[0])
        send(words, places, token, flag, places < ROUTE.words, areas, ROUTE)


def sum_experts(
    partial: Tensor, routed: Routed, *, released: Release = Release.BY_KERNEL, tile: Tile | None = None
) -> Tensor:
    """``y[t] = sum_j weights[t, j] * partial[t, j]  (+ sigmoid(shared_gate[t]) * shared[t])``, ``[T, H]``.

    Args:
        partial: ``[T * top_k, H]``, the experts' outputs; rows of pairs without an expert are not read.
        released: when the next kernel may start.
        tile: overrides the choice by ``TILES`` (tests and measurements).
    """
    out = torch.empty((len(routed.ids), partial.shape[1]), dtype=partial.dtype, device=partial.device)
    _launch(partial, routed, out, tile, None, released=released)
    return out


def send_experts(partial: Tensor, routed: Routed, peers: PeerBuffers) -> SentRows:
    """``sum_experts``, sent to every rank; they are rows that ``takes_packets``."""
    count = len(routed.ids)
    sent = SentRows.to(peers, count, partial.dtype, passed_on=not 2 <= count <= 8)  # of these that was slower
    _launch(partial, routed, sent.room[0], None, peers, passes_on=sent.passed_on)
    return sent


def _launch(
    partial: Tensor,
    routed: Routed,
    out: Tensor,
    tile: Tile | None,
    peers: PeerBuffers | None,
    *,
    passes_on: bool = False,
    released: Release = Release.BY_KERNEL,
) -> None:
    weights, ids, shared, shared_gate = routed
    (num_tokens, top_k), hidden_size = ids.shape, partial.shape[1]
    assert ids.is_contiguous() and weights.is_contiguous()
    route, addresses, counters = None, ids, ids
    if peers is not None:
        route, addresses, counters = route_to(peers, partial.dtype), peers.addresses, peers.counters
    tile = tile or choose_tile(TILES, num_tokens)
    block = min(tile.columns, next_power_of_2(hidden_size))
    extra, gate = partial if shared is None else shared, partial if shared_gate is None else shared_gate
    _sum_kernel[(cdiv(hidden_size, block), num_tokens)](
        partial, weights, ids, extra, gate, out, addresses, counters, extra.stride(0), gate.stride(0), out.stride(0),
        HIDDEN=hidden_size, TOP_K=top_k, SHARED=shared is not None, GATED=shared_gate is not None, BLOCK=block,
        ROUTE=route, PASSES_ON=passes_on, num_warps=tile.warps, maxnreg=tile.max_registers,
        **early_launch(partial.device, released),
    )  # fmt: skip
