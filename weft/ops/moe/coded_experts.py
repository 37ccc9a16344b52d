"""Expert products with coded weights (``weft.ops.codes``): up and down, grouped by expert, as ``experts.py``.

Job: ``coded_fused_moe`` on the GPU. Owns: the kernel and its tile shapes. Does not know: routing, sharding, how pairs
are grouped (``groups.py``), how codes become numbers (``codes/product.py``).
"""

import functools
import json
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.codes import CodedMatrix
from weft.ops.codes.product import coded_product, fixed_of, operands_of
from weft.ops.linear.few_rows import rows_of_block
from weft.ops.moe import NO_EXTRAS, ExpertExtras, Routed
from weft.ops.moe.blocks import UNGROUPED_TOKENS, Tile, Tiles, block_of, gated_activation, pairs_at, single_pairs
from weft.ops.moe.coded import coded_fused_moe
from weft.ops.moe.combine import sum_experts
from weft.ops.moe.groups import group_pairs
from weft.ops.triton.early_launch import Release, early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv
from weft.ops.triton.tile_table import choose_tile, has_table

if GLUON_IS_KNOWN:
    from weft.ops.moe import coded_pairs_hopper as hopper

TABLE_PATH = Path(__file__).with_name("coded_moe_h200.json")

PAIRED_TOKENS = 4
"""Most tokens whose pairs the kernel for Hopper computes one by one: with 10 of 512 experts 30 us instead of 37 at 4
tokens, 54 instead of 47 at 8 (``kernels-coded-scales-h200.json``)."""


@triton.jit
def _activated(acc, alpha, limit, up_offset, gate_cap, up_cap, GATED: tl.constexpr):
    """The activation of ``[ROWS, TOKENS]`` sums; of gated experts gate and up rows stand in turn."""
    if GATED:
        TOKENS: tl.constexpr = acc.shape[1]
        gate, up = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0] // 2, 2, TOKENS]), [0, 2, 1]))
        result = gated_activation(gate, up, alpha, limit, up_offset, gate_cap, up_cap)
    else:
        result = tl.maximum(acc, 0.0)
        result *= result
    return result


@jit
def _coded_experts_kernel(
    inputs, words, scales, zeros, row_scale, bias, out, ids, pairs, first_place, block_expert, block_first, num_blocks,
    stride_inputs, chunks, alpha, limit, up_offset, gate_cap, up_cap,
    FIXED: tl.constexpr, TOP_K: tl.constexpr, UP: tl.constexpr, GATED: tl.constexpr, GROUPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of a block of pairs. The up product reads rows of tokens and writes rows of places; the down product
    reads rows of places and writes rows of pairs."""
    enter(EARLY)
    block = block_of(ids, first_place, block_expert, block_first, num_blocks, tl.program_id(1), GROUPED)
    expert, first, end = block
    if expert >= 0:
        ROWS: tl.constexpr = FIXED.rows
        WIDTH: tl.constexpr = FIXED.width // 2 if GATED else FIXED.width
        places = first + tl.arange(0, FIXED.tokens)
        inside = places < end
        pair = pairs_at(pairs, places, inside, GROUPED)
        source = pair // TOP_K if UP else places
        target = places if UP else pair
        rows = rows_of_block(tl.program_id(0), WIDTH, ROWS, GATED)
        x_rows = inputs + source.to(tl.int64) * stride_inputs
        matrix = (words, scales, zeros, row_scale)
        acc = coded_product(matrix, expert.to(tl.int64), rows, x_rows, inside, 0, chunks, FIXED)
        if bias is not None:
            acc += tl.load(bias + expert.to(tl.int64) * FIXED.width + rows).to(tl.float32)[:, None]
        if UP:
            acc = _activated(acc, alpha, limit, up_offset, gate_cap, up_cap, GATED)
        columns = tl.program_id(0) * acc.shape[0] + tl.arange(0, acc.shape[0])
        offsets = target.to(tl.int64)[None, :] * WIDTH + columns[:, None]
        mask = (columns < WIDTH)[:, None] & inside[None, :]
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@functools.cache
def load_table() -> dict[tuple[int, int, int], dict[int, Tiles]]:
    """``(experts, hidden size, expert width)`` to what was fastest for up to so many tokens."""
    table: dict[tuple[int, int, int], dict[int, Tiles]] = {}
    for row in json.loads(TABLE_PATH.read_text())["rows"]:
        key = (row["experts"], row["hidden"], row["width"])
        table.setdefault(key, {})[row["tokens"]] = Tiles(Tile(*row["up"]), Tile(*row["down"]))
    return table


def choose_tiles(down: CodedMatrix, num_tokens: int, top_k: int) -> Tiles:
    """Tiles for experts of ``down [E, H, I]``: measured for this size and at least this many tokens, else by rule."""
    num_experts, hidden = down.words.shape[0], down.words.shape[2]
    if has_table(down.words.device):
        tuned = load_table().get((num_experts, hidden, down.columns))
        if tuned:
            return choose_tile(tuned, num_tokens)
    return tiles_by_rule(num_tokens * top_k / num_experts)


def tiles_by_rule(average: float) -> Tiles:
    """Tiles for a number of pairs per expert, as measured with 513 experts of 512. ``columns`` are weight rows of a
    program; ``inner`` has no meaning."""
    if average <= 2:
        columns, stages = (64, 4) if average <= 0.05 else (128, 3)  # so few pairs need more programs
        return Tiles(Tile(8, columns, 0, 4, stages), Tile(8, columns, 0, 4, stages))
    if average <= 8:
        return Tiles(Tile(16, 128, 0, 4, 3), Tile(16, 128, 0, 4, 3))
    if average <= 24:
        return Tiles(Tile(32, 64, 0, 4, 3), Tile(32, 64, 0, 4, 3))
    return Tiles(Tile(64, 128, 0, 4, 3), Tile(64, 128, 0, 4, 3))


@launches(coded_fused_moe)
def coded_fused_moe_triton(
    x, gate_up, down, weights, ids, *, extras, shared, shared_gate, tiles: Tiles | None = None
) -> Tensor:
    """``coded_fused_moe`` of ``weft/ops/moe/coded.py``. ``tiles``: overrides the choice (tests and measurements)."""
    outputs = pair_outputs(x, gate_up, down, ids, extras, tiles)
    released = Release.AT_END if len(ids) == 1 else Release.BY_KERNEL  # as ``fused_moe_triton``
    return sum_experts(outputs, Routed(weights, ids, shared, shared_gate), released=released)


def takes_pairs(x: Tensor, gate_up: CodedMatrix, down: CodedMatrix, extras: ExpertExtras) -> bool:
    """Whether the kernel for Hopper, which knows SwiGLU alone, takes pairs of these experts."""
    plain = extras == NO_EXTRAS and x.dtype == torch.bfloat16
    return plain and GLUON_IS_KNOWN and hopper.takes_pairs(gate_up, down)


def _pairs_on_hopper(x: Tensor, gate_up: CodedMatrix, down: CodedMatrix, ids: Tensor) -> Tensor:
    hidden = torch.empty((ids.numel(), down.columns), dtype=x.dtype, device=x.device)
    out = torch.empty((ids.numel(), down.words.shape[2]), dtype=x.dtype, device=x.device)
    hopper.pairs_hopper_product(x, gate_up, hidden, ids, hopper.UP)
    hopper.pairs_hopper_product(hidden, down, out, ids, hopper.DOWN)
    return out


def pair_outputs(
    x: Tensor, gate_up: CodedMatrix, down: CodedMatrix, ids: Tensor, extras: ExpertExtras, tiles: Tiles | None = None
) -> Tensor:
    """``[T * top_k, H]``: what each pair's expert makes of its token, up to the sum."""
    num_tokens, top_k = ids.shape
    if tiles is None and num_tokens <= PAIRED_TOKENS and takes_pairs(x, gate_up, down, extras):
        return _pairs_on_hopper(x, gate_up, down, ids)
    tiles = choose_tiles(down, num_tokens, top_k) if tiles is None else tiles
    assert tiles.up.rows == tiles.down.rows and x.stride(1) == 1 and ids.is_contiguous() and ids.dtype == torch.int32
    grouped = num_tokens > UNGROUPED_TOKENS
    grouping, num_blocks = group_pairs(ids, gate_up.words.shape[0], tiles.up.rows) if grouped else single_pairs(ids)
    gated = gate_up.words.shape[2] == 2 * down.columns
    hidden = torch.empty((ids.numel(), down.columns), dtype=x.dtype, device=x.device)
    out = torch.empty((ids.numel(), down.words.shape[2]), dtype=x.dtype, device=x.device)

    def launch(matrix: CodedMatrix, source: Tensor, target: Tensor, bias: Tensor | None, tile: Tile, up: bool) -> None:
        fixed = fixed_of(matrix, x, rows=tile.columns, tokens=tile.rows, stages=tile.stages)
        blocks = cdiv(target.shape[1], tile.columns // 2 if up and gated else tile.columns)
        _coded_experts_kernel[(blocks, num_blocks)](
            source, *operands_of(matrix), bias, target, ids, *grouping, source.stride(0), matrix.words.shape[1],
            *extras.activation,
            FIXED=fixed, TOP_K=top_k, UP=up, GATED=up and gated, GROUPED=grouped, num_warps=tile.warps,
            **early_launch(ids.device),
        )  # fmt: skip

    launch(gate_up, x, hidden, extras.gate_up_bias, tiles.up, True)
    launch(down, hidden, out, extras.down_bias, tiles.down, False)
    return out
