"""Shared parts of the expert products of every dtype: tiles, and blocks of places of one expert.

A place is a (token, expert) pair's position in the order of ``groups.py``; a block is up to ``rows`` consecutive
places of one expert. Does not know: weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.elementwise import softcapped_swiglu

UNGROUPED_TOKENS = 3
"""Most tokens whose pairs are not grouped: so few rarely share an expert, and if they do, its weights are still in the
L2 cache."""

_HALVED_ROWS = tl.constexpr(128)
"""Least rows of a tile for which a block that is at most half full runs as a tile of half the rows: experts of 160
pairs would otherwise compute 256 rows."""


class Tile(NamedTuple):
    """Places, output columns and inner elements of one tile, warps and pipeline stages.

    ``span``: with more than one, a program of the down product goes through so many tiles of columns: the weights of
    the next tile come while one is written. In two bytes with all inner elements of each at once.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    span: int = 1


class Tiles(NamedTuple):
    """Tiles of the two products; they share ``rows``, the length of a block."""

    up: Tile
    down: Tile


@triton.jit
def block_of(ids, first_place, block_expert, block_first, num_blocks, block, GROUPED: tl.constexpr):
    """``(expert, first, end)`` of a block: the places of its pairs, up to ``end``; expert -1 where there is nothing to
    do."""
    if GROUPED:
        expert = -1
        first = 0
        end = 0
        if block < tl.load(num_blocks):
            expert = tl.load(block_expert + block)
            first = tl.load(block_first + block)
            end = tl.load(first_place + expert + 1)
    else:
        expert = tl.load(ids + block)
        first = block
        end = block + 1
    return expert, first, end


@triton.jit
def run_block(TILE: tl.constexpr, operands, block, column, FIXED: tl.constexpr, ROWS: tl.constexpr):
    """Run ``TILE`` for a block with an expert, with half the rows if they hold the block and are worth their code."""
    if block[0] >= 0:
        half_full = False
        if ROWS >= _HALVED_ROWS:
            half_full = block[2] - block[1] <= ROWS // 2
        if half_full:
            TILE(operands, block, column, FIXED, ROWS // 2)
        else:
            TILE(operands, block, column, FIXED, ROWS)


@triton.jit
def pairs_at(pairs, places, inside, GROUPED: tl.constexpr):
    """The pairs at some places."""
    pair = places
    if GROUPED:
        pair = tl.load(pairs + places, mask=inside, other=0)
    return pair


@triton.jit
def gated_activation(gate, up, alpha, limit, up_offset, gate_cap, up_cap):
    """The activation of gated experts, as ``fused_moe`` and ``ExpertExtras`` say. Numbers of other activations are
    None."""
    if limit is not None:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_offset)
    elif gate_cap is not None:
        result = softcapped_swiglu(gate, up, gate_cap, up_cap)
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result


@triton.jit
def load_tile(rows, k, inside, DEPTH: tl.constexpr, INNER: tl.constexpr, FULL: tl.constexpr):
    """``[len(rows), INNER]`` of rows of ``DEPTH`` elements, zeros outside. ``FULL``: all rows are inside."""
    if DEPTH % INNER == 0 and FULL:
        tile = tl.load(rows + k[None, :])
    elif DEPTH % INNER == 0:
        tile = tl.load(rows + k[None, :], mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(rows + k[None, :], mask=inside[:, None] & (k < DEPTH)[None, :], other=0.0)
    return tile


def single_pairs(ids: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """A block per pair, and stand-ins for the grouping that the kernels do not read."""
    return (ids,) * 5, ids.numel()
