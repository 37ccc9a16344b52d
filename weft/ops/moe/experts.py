"""Mixture-of-experts kernels: two matrix products, grouped by expert, between the grouping and the sum.

Job: ``fused_moe`` on the GPU, for a few tokens (weights stream through once, memory bound) and for many. Owns: the
products and their tile shapes. Does not know: routing, sharding, how pairs are grouped (``groups.py``).

    group    pairs of one expert become consecutive places, cut into blocks of ``rows`` places; one block, one expert
    up       hidden[place] = silu(gate_up[e, :I] x[token]) * (gate_up[e, I:] x[token]), or another activation
    down     out[pair]     = down[e] hidden[place]
    sum      y[token]      = sum_j weights[token, j] * out[token, j]  (+ sigmoid(gate) * shared)

Very few tokens need no grouping: each pair is a block of its own. Results are written per pair and summed in order, so
no result depends on the order in which programs run. Graph-safe: the grid is the most blocks that any routing of this
many tokens can need; the real number is on the device.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.moe import ExpertExtras, Routed, fused_moe
from weft.ops.moe.blocks import (
    UNGROUPED_TOKENS,
    Tile,
    Tiles,
    block_of,
    gated_activation,
    load_tile,
    pairs_at,
    run_block,
    single_pairs,
)
from weft.ops.moe.combine import sum_experts
from weft.ops.moe.groups import group_pairs
from weft.ops.triton.early_launch import Release, early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, fitting_stages, next_power_of_2, precision


class Fixed(NamedTuple):
    """Compile-time parameters of a product.

    Attributes:
        hidden, width: sizes of an expert, H and I.
        top_k: pairs per token.
        columns, inner, stages, span: of its ``Tile``.
        grouped: blocks are those of ``group_pairs``; else each pair is one.
        precision: of products of float32 operands.
        gated: as the activation of ``fused_moe``.
    """

    hidden: int
    width: int
    top_k: int
    columns: int
    inner: int
    stages: int
    span: int
    grouped: bool
    precision: str
    gated: bool


@triton.jit
def _up_tile(operands, block, column, FIXED: tl.constexpr, ROWS: tl.constexpr):
    """Gate and up product of up to ``ROWS`` pairs of one expert, and the activation."""
    x, gate_up, bias, hidden, pairs, stride_x, alpha, limit, up_offset, gate_cap, up_cap = operands
    expert, first, end = block
    HIDDEN: tl.constexpr = FIXED.hidden
    WIDTH: tl.constexpr = FIXED.width
    COLUMNS: tl.constexpr = FIXED.columns
    GATED: tl.constexpr = FIXED.gated
    PRECISION: tl.constexpr = FIXED.precision
    MATRICES: tl.constexpr = 2 if GATED else 1
    places = first + tl.arange(0, ROWS)
    inside = places < end
    pair = pairs_at(pairs, places, inside, FIXED.grouped)
    columns = column + tl.arange(0, COLUMNS)
    in_width = columns < WIDTH
    inner = tl.arange(0, FIXED.inner)
    token_rows = x + (pair // FIXED.top_k).to(tl.int64)[:, None] * stride_x
    gate_rows = gate_up + expert.to(tl.int64) * (MATRICES * WIDTH * HIDDEN) + columns[:, None] * HIDDEN
    up_rows = gate_rows + (WIDTH * HIDDEN if GATED else 0)
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, HIDDEN, FIXED.inner, num_stages=FIXED.stages):
        k = start + inner
        a = load_tile(token_rows, k, inside, HIDDEN, FIXED.inner, False)
        u = load_tile(up_rows, k, in_width, HIDDEN, FIXED.inner, WIDTH % COLUMNS == 0)
        if GATED:
            g = load_tile(gate_rows, k, in_width, HIDDEN, FIXED.inner, WIDTH % COLUMNS == 0)
        up = tl.dot(a, tl.trans(u), up, input_precision=PRECISION)
        if GATED:
            gate = tl.dot(a, tl.trans(g), gate, input_precision=PRECISION)
    if bias is not None:
        rows_bias = bias + expert.to(tl.int64) * (MATRICES * WIDTH) + columns
        up += tl.load(rows_bias + (WIDTH if GATED else 0), mask=in_width, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(rows_bias, mask=in_width, other=0.0).to(tl.float32)[None, :]
    if GATED:
        result = gated_activation(gate, up, alpha, limit, up_offset, gate_cap, up_cap)
    else:
        result = tl.maximum(up, 0.0)
        result *= result
    offsets = places.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(hidden + offsets, result.to(hidden.dtype.element_ty), mask=inside[:, None] & in_width[None, :])


@jit
def _up_kernel(
    x, gate_up, bias, hidden, ids, pairs, first_place, block_expert, block_first, num_blocks, stride_x, alpha, limit,
    up_offset, gate_cap, up_cap,
    FIXED: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    grouping = (ids, first_place, block_expert, block_first, num_blocks)
    block = block_of(*grouping, tl.program_id(1), FIXED.grouped)
    column = tl.program_id(0) * FIXED.columns
    operands = (x, gate_up, bias, hidden, pairs, stride_x, alpha, limit, up_offset, gate_cap, up_cap)
    run_block(_up_tile, operands, block, column, FIXED, ROWS)


@triton.jit
def _down_tile(operands, block, column, FIXED: tl.constexpr, ROWS: tl.constexpr):
    """Down product of up to ``ROWS`` pairs of one expert."""
    hidden, down, bias, out, pairs = operands
    expert, first, end = block
    HIDDEN: tl.constexpr = FIXED.hidden
    WIDTH: tl.constexpr = FIXED.width
    COLUMNS: tl.constexpr = FIXED.columns
    places = first + tl.arange(0, ROWS)
    inside = places < end
    pair = pairs_at(pairs, places, inside, FIXED.grouped)
    columns = column + tl.arange(0, COLUMNS)
    in_hidden = columns < HIDDEN
    inner = tl.arange(0, FIXED.inner)
    hidden_rows = hidden + places.to(tl.int64)[:, None] * WIDTH
    down_rows = down + expert.to(tl.int64) * (HIDDEN * WIDTH) + columns[:, None] * WIDTH
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, WIDTH, FIXED.inner, num_stages=FIXED.stages):
        k = start + inner
        a = load_tile(hidden_rows, k, inside, WIDTH, FIXED.inner, False)
        b = load_tile(down_rows, k, in_hidden, WIDTH, FIXED.inner, HIDDEN % COLUMNS == 0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=FIXED.precision)
    if bias is not None:
        added = tl.load(bias + expert.to(tl.int64) * HIDDEN + columns, mask=in_hidden, other=0.0)
        acc += added.to(tl.float32)[None, :]
    offsets = pair.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside[:, None] & in_hidden[None, :])


@triton.jit
def _down_tiles(operands, block, column, FIXED: tl.constexpr, ROWS: tl.constexpr):
    """``FIXED.span`` tiles of columns, one after the other; ``FIXED.inner`` holds all inner elements."""
    hidden, down, bias, out, pairs = operands
    expert, first, end = block
    HIDDEN: tl.constexpr = FIXED.hidden
    WIDTH: tl.constexpr = FIXED.width
    COLUMNS: tl.constexpr = FIXED.columns
    SPAN: tl.constexpr = FIXED.span
    places = first + tl.arange(0, ROWS)
    inside = places < end
    rows = out + pairs_at(pairs, places, inside, FIXED.grouped).to(tl.int64)[:, None] * HIDDEN
    inner = tl.arange(0, FIXED.inner)
    in_width = inner < WIDTH
    hidden_rows = hidden + places.to(tl.int64)[:, None] * WIDTH
    a = tl.load(hidden_rows + inner[None, :], mask=inside[:, None] & in_width[None, :], other=0.0)
    weights = down + expert.to(tl.int64) * (HIDDEN * WIDTH)
    for start in tl.range(column, column + SPAN * COLUMNS, COLUMNS, num_stages=FIXED.stages):
        columns = start + tl.arange(0, COLUMNS)
        in_hidden = columns < HIDDEN
        if FIXED.inner == WIDTH and HIDDEN % (SPAN * COLUMNS) == 0:
            b = tl.load(weights + columns[:, None] * WIDTH + inner[None, :])
        else:
            mask = in_hidden[:, None] & in_width[None, :]
            b = tl.load(weights + columns[:, None] * WIDTH + inner[None, :], mask=mask, other=0.0)
        acc = tl.dot(a, tl.trans(b), input_precision=FIXED.precision)
        if bias is not None:
            added = tl.load(bias + expert.to(tl.int64) * HIDDEN + columns, mask=in_hidden, other=0.0)
            acc += added.to(tl.float32)[None, :]
        tl.store(rows + columns[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None] & in_hidden[None, :])


@jit
def _down_kernel(
    hidden, down, bias, out, ids, pairs, first_place, block_expert, block_first, num_blocks,
    FIXED: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    grouping = (ids, first_place, block_expert, block_first, num_blocks)
    block = block_of(*grouping, tl.program_id(1), FIXED.grouped)
    column = tl.program_id(0) * (FIXED.columns * FIXED.span)
    operands = (hidden, down, bias, out, pairs)
    run_block(_down_tiles if FIXED.span > 1 else _down_tile, operands, block, column, FIXED, ROWS)


def moe_tiles(num_pairs: int, num_experts: int, element_size: int, width: int) -> Tiles:
    """Tiles for a number of pairs; ``rows`` follows the average number of pairs per expert.

    Up to 24 pairs per expert the products are memory bound and small tiles keep many loads in flight. Narrow experts,
    as on one of several ranks, have few tiles: those of very few pairs load more at once. A down product of few inner
    elements is faster with less of it under way in more programs. (Measured for 10 experts of 512 per token.)
    """
    average = num_pairs / num_experts
    if element_size == 4:
        rows = 16 if average <= 24 else 32
        return Tiles(Tile(rows, 32, 32, 4, 2), Tile(rows, 32, 32, 4, 2))
    if average <= 8 and width <= 256:
        if num_pairs <= 16:
            return Tiles(Tile(16, 32, 256, 8, 4), Tile(16, 64, 128, 4, 4))
        return Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 128, 128, 4, 2))
    if average <= 8:
        return Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
    if average <= 24:
        return Tiles(Tile(32, 64, 128, 4, 3), Tile(32, 128, 64 if width <= 128 else 128, 4, 3))
    if average <= 64:
        down = Tile(64, 32, 128, 4, 3, span=32) if width <= 128 else Tile(64, 128, 64, 4, 3 if width <= 512 else 4)
        return Tiles(Tile(64, 64, 64, 4, 4), down)
    if width <= 128:
        return Tiles(Tile(128, 128, 64, 8, 4), Tile(128, 64, 128, 4, 2, span=16))
    return Tiles(Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4))


@launches(fused_moe, invariant={})
def fused_moe_triton(
    x, gate_up, down, weights, ids, *, extras, shared, shared_gate, tiles: Tiles | None = None
) -> Tensor:
    """``fused_moe`` of ``weft/ops/moe``. ``tiles``: for tuning; None takes ``moe_tiles``."""
    outputs = pair_outputs(x, gate_up, down, ids, extras, tiles)
    # With one token, kernels of a whole layer would wait at the same time and load weights before earlier kernels do.
    released = Release.AT_END if len(ids) == 1 else Release.BY_KERNEL
    return sum_experts(outputs, Routed(weights, ids, shared, shared_gate), released=released)


def pair_outputs(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, extras: ExpertExtras, tiles: Tiles | None = None
) -> Tensor:
    """``[T * top_k, H]``: what each pair's expert makes of its token, up to the sum."""
    gate_up_bias, down_bias, *_ = extras
    tiles = moe_tiles(ids.numel(), gate_up.shape[0], x.element_size(), down.shape[2]) if tiles is None else tiles
    assert tiles.up.rows == tiles.down.rows
    assert gate_up.is_contiguous() and down.is_contiguous() and ids.is_contiguous()
    assert x.stride(1) == 1 and ids.dtype == torch.int32
    num_tokens, top_k = ids.shape
    grouped = num_tokens > UNGROUPED_TOKENS
    grouping, num_blocks = group_pairs(ids, gate_up.shape[0], tiles.up.rows) if grouped else single_pairs(ids)
    _num_experts, hidden_size, width = down.shape
    hidden = torch.empty((ids.numel(), width), dtype=x.dtype, device=x.device)
    partial = torch.empty((ids.numel(), hidden_size), dtype=x.dtype, device=x.device)
    gated = gate_up.shape[1] == 2 * width

    def compiled_for(tile: Tile, inner: int) -> dict[str, Any]:
        matrices = 2 if gated and tile is tiles.up else 1
        stage_bytes = inner * (tile.rows + matrices * tile.columns) * x.element_size()
        stages = fitting_stages(tile.stages, stage_bytes, x.device)
        fixed = Fixed(
            hidden_size, width, top_k, tile.columns, inner, stages, tile.span, grouped, precision(x), gated
        )  # fmt: skip
        return {"FIXED": fixed, "ROWS": tile.rows, "num_warps": tile.warps}

    tile = tiles.up
    _up_kernel[(cdiv(width, tile.columns), num_blocks)](
        x, gate_up, gate_up_bias, hidden, ids, *grouping, x.stride(0), *extras.activation,
        **compiled_for(tile, tile.inner), **early_launch(ids.device),
    )  # fmt: skip
    tile = tiles.down
    inner = _power(width) if tile.span > 1 else min(tile.inner, _power(width))
    _down_kernel[(cdiv(hidden_size, tile.columns * tile.span), num_blocks)](
        hidden, down, down_bias, partial, ids, *grouping, **compiled_for(tile, inner), **early_launch(ids.device)
    )
    return partial


def _power(size: int) -> int:
    """The smallest power of two that holds ``size`` and is long enough for a matrix product."""
    return max(16, next_power_of_2(size))
