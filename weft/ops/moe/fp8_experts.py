"""Mixture-of-experts kernels for FP8 weights: up, SiLU and multiply, quantise, down.

Job: ``fp8_fused_moe`` on the GPU, for a few tokens and for many. Owns: both products of grouped pairs, all tiles. Does
not know: routing, sharding, how pairs are grouped (``groups.py``) or summed (``combine.py``).

The steps are those of ``experts.py``; very few tokens need no grouping (``fp8_pairs.py``). Sums of 128 products are
scaled and added up in float32. The first launch of the grouping quantises the inputs. In the up product each program
would repeat the work in every step. Hidden values are rounded to the model's dtype and quantised where one program has
all values of a scale. With scales of blocks that is the end of the up product if its tile is as wide as a block, else
the loads of the down product. With a scale for each row, and in blocks on Hopper, a launch between the two does it.
"""

import enum
import functools
import json
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.fp8.quantize import prepare_pass, quantize_inputs_triton, scale_of, to_e4m3
from weft.ops.moe import NO_EXTRAS, ExpertExtras, Routed, fp8_fused_moe
from weft.ops.moe.blocks import UNGROUPED_TOKENS, Tile, Tiles, block_of, gated_activation, load_tile, run_block
from weft.ops.moe.combine import sum_experts
from weft.ops.moe.fp8_pairs import pairs_product
from weft.ops.moe.groups import group_pairs
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, fitting_stages, is_hopper
from weft.ops.triton.tile_table import choose_tile, has_table

if GLUON_IS_KNOWN:
    from weft.ops.moe import fp8_experts_hopper, fp8_pairs_hopper

TABLE_PATH = Path(__file__).with_name("fp8_moe_h200.json")


class Fixed(NamedTuple):
    """Compile-time parameters of a product (see ``fp8_fused_moe``).

    Attributes:
        static: one scale of all inputs is given.
        quantized: hidden values are stored in e4m3.
        dtype: hidden values are rounded to this type first. A name: no hook of Triton prints a dtype in a tuple.
        columns, stages, span: of its ``Tile``.
    """

    hidden: int
    width: int
    top_k: int
    block: int
    static: bool
    quantized: bool
    dtype: str
    columns: int
    stages: int
    span: int


@triton.jit
def _block_scale(scale_rows, columns, step, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """``[1]``: the scale of some weight rows, which lie in one block, and one step."""
    return tl.load(scale_rows + tl.min(columns, 0) // BLOCK * GROUPS + step + tl.zeros([1], dtype=tl.int32))


@triton.jit
def _up_tile(operands, block, column, FIXED: tl.constexpr, ROWS: tl.constexpr):
    """Gate and up product of up to ``ROWS`` pairs of one expert, and the activation."""
    (
        values, scales, gate_up, gate_up_scale, hidden, hidden_scale, pairs, stride_group,
        alpha, limit, up_offset, gate_cap, up_cap,
    ) = operands  # fmt: skip
    expert, first, end = block
    HIDDEN: tl.constexpr = FIXED.hidden
    WIDTH: tl.constexpr = FIXED.width
    BLOCK: tl.constexpr = FIXED.block
    COLUMNS: tl.constexpr = FIXED.columns
    places = first + tl.arange(0, ROWS)
    inside = places < end
    token = (tl.load(pairs + places, mask=inside, other=0) // FIXED.top_k).to(tl.int64)
    columns = column + tl.arange(0, COLUMNS)
    in_width = columns < WIDTH
    inner = tl.arange(0, 128)
    value_rows = values + token[:, None] * HIDDEN
    gate_rows = gate_up + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + columns[:, None] * HIDDEN
    up_rows = gate_rows + WIDTH * HIDDEN
    GROUPS: tl.constexpr = (HIDDEN + 128 - 1) // 128
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, HIDDEN, 128, num_stages=FIXED.stages):
        k = start + inner
        a = load_tile(value_rows, k, inside, HIDDEN, 128, False)
        gate_sums = tl.dot(a, tl.trans(load_tile(gate_rows, k, in_width, HIDDEN, 128, WIDTH % COLUMNS == 0)))
        up_sums = tl.dot(a, tl.trans(load_tile(up_rows, k, in_width, HIDDEN, 128, WIDTH % COLUMNS == 0)))
        if BLOCK:
            of_inputs = tl.load(scales + start // 128 * stride_group + token, mask=inside, other=0.0)
            gate_scales = gate_up_scale + expert.to(tl.int64) * (2 * WIDTH // BLOCK * GROUPS)
            up_scales = gate_scales + WIDTH // BLOCK * GROUPS
            step = start // 128
            of_gate = _block_scale(gate_scales, columns, step, GROUPS, BLOCK)
            of_up = _block_scale(up_scales, columns, step, GROUPS, BLOCK)
            gate_sums *= of_inputs[:, None] * of_gate[None, :]
            up_sums *= of_inputs[:, None] * of_up[None, :]
        gate += gate_sums
        up += up_sums
    if not BLOCK:
        of_inputs = tl.load(scales + token * 0) if FIXED.static else tl.load(scales + token, mask=inside, other=0.0)
        channel = gate_up_scale + expert.to(tl.int64) * (2 * WIDTH) + columns
        gate *= of_inputs[:, None] * tl.load(channel, mask=in_width, other=0.0)[None, :]
        up *= of_inputs[:, None] * tl.load(channel + WIDTH, mask=in_width, other=0.0)[None, :]
    result = gated_activation(gate, up, alpha, limit, up_offset, gate_cap, up_cap)
    if FIXED.dtype == "bfloat16":
        result = result.to(tl.bfloat16)
    elif FIXED.dtype == "float16":
        result = result.to(tl.float16)
    stored = inside[:, None] & in_width[None, :]
    offsets = places.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    if FIXED.quantized:
        wide = tl.reshape(result.to(tl.float32), [ROWS, COLUMNS // BLOCK, BLOCK])
        scale = scale_of(tl.max(tl.abs(wide), 2))
        quantized = tl.reshape(to_e4m3(wide, scale[:, :, None]), [ROWS, COLUMNS])
        tl.store(hidden + offsets, quantized, mask=stored)
        group = column // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        scale_at = places.to(tl.int64)[:, None] * (WIDTH // BLOCK) + group[None, :]
        tl.store(hidden_scale + scale_at, scale, mask=inside[:, None] & (group * BLOCK < WIDTH)[None, :])
    else:
        tl.store(hidden + offsets, result, mask=stored)


@jit(do_not_specialize=["stride_group"])
def _fp8_up_kernel(
    values, scales, gate_up, gate_up_scale, hidden, hidden_scale, ids, pairs, first_place, block_expert, block_first,
    num_blocks, stride_group, alpha, limit, up_offset, gate_cap, up_cap,
    FIXED: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    block = block_of(ids, first_place, block_expert, block_first, num_blocks, tl.program_id(1), True)
    column = tl.program_id(0) * FIXED.columns
    operands = (
        values, scales, gate_up, gate_up_scale, hidden, hidden_scale, pairs, stride_group,
        alpha, limit, up_offset, gate_cap, up_cap,
    )  # fmt: skip
    run_block(_up_tile, operands, block, column, FIXED, ROWS)


@triton.jit
def _store_outputs(out, down_scale, expert, pair, inside, columns, of_rows, acc, FIXED: tl.constexpr):
    """A tile of outputs, each row where its pair's are."""
    HIDDEN: tl.constexpr = FIXED.hidden
    in_hidden = columns < HIDDEN
    if not FIXED.block:
        channel = down_scale + expert.to(tl.int64) * HIDDEN + columns
        acc *= of_rows[:, None] * tl.load(channel, mask=in_hidden, other=0.0)[None, :]
    offsets = pair.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside[:, None] & in_hidden[None, :])


@triton.jit
def _down_tile(operands, block, column, FIXED: tl.constexpr, ROWS: tl.constexpr):
    """Compute the down product of up to ``ROWS`` pairs of one expert. One loop goes through ``span`` tiles of columns,
    so that the first loads of a tile are under way while the previous tile is written."""
    hidden, hidden_scale, down, down_scale, out, pairs = operands
    expert, first, end = block
    HIDDEN: tl.constexpr = FIXED.hidden
    WIDTH: tl.constexpr = FIXED.width
    BLOCK: tl.constexpr = FIXED.block
    COLUMNS: tl.constexpr = FIXED.columns
    SPAN: tl.constexpr = FIXED.span
    GROUPS: tl.constexpr = (WIDTH + 128 - 1) // 128
    FULL: tl.constexpr = HIDDEN % (COLUMNS * SPAN) == 0
    places = first + tl.arange(0, ROWS)
    inside = places < end
    pair = tl.load(pairs + places, mask=inside, other=0)
    columns = column + tl.arange(0, COLUMNS)
    inner = tl.arange(0, 128)
    hidden_rows = hidden + places.to(tl.int64)[:, None] * WIDTH
    down_rows = down + expert.to(tl.int64) * (HIDDEN * WIDTH) + columns[:, None] * WIDTH
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    of_rows = tl.zeros([ROWS], dtype=tl.float32)
    if not BLOCK:
        of_rows = tl.load(hidden_scale + places * 0) if FIXED.static else tl.load(hidden_scale + places, mask=inside)
    STRIDE: tl.constexpr = 128 if SPAN == 1 else 1  # counted in elements a single tile takes fewer instructions
    for i in tl.range(0, SPAN * GROUPS * STRIDE, STRIDE, num_stages=FIXED.stages):
        step, behind, k = i // STRIDE, 0, i + inner
        if SPAN > 1:
            step, behind = i % GROUPS, i // GROUPS * COLUMNS
            k = step * 128 + inner  # a product: the compiler sees that it is aligned, else no copy is asynchronous
        of_inputs = of_rows
        a = load_tile(hidden_rows, k, inside, WIDTH, 128, False)
        if BLOCK and FIXED.quantized:
            of_inputs = tl.load(hidden_scale + places * GROUPS + step, mask=inside, other=0.0)
        elif BLOCK:
            wide = a.to(tl.float32)
            of_inputs = scale_of(tl.max(tl.abs(wide), 1))
            a = to_e4m3(wide, of_inputs[:, None])
        b = load_tile(down_rows + behind * WIDTH, k, columns + behind < HIDDEN, WIDTH, 128, FULL)
        sums = tl.dot(a, tl.trans(b))
        if BLOCK:
            scale_rows = down_scale + expert.to(tl.int64) * (tl.cdiv(HIDDEN, BLOCK) * GROUPS)
            of_weights = _block_scale(scale_rows, columns + behind, step, GROUPS, BLOCK)
            sums *= of_inputs[:, None] * of_weights[None, :]
        acc += sums
        if SPAN > 1:  # noqa: SIM102 (known to the compiler, so not one condition with the next)
            if step == GROUPS - 1:
                _store_outputs(out, down_scale, expert, pair, inside, columns + behind, of_rows, acc, FIXED)
                acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if SPAN == 1:
        _store_outputs(out, down_scale, expert, pair, inside, columns, of_rows, acc, FIXED)


@jit
def _fp8_down_kernel(
    hidden, hidden_scale, down, down_scale, out, ids, pairs, first_place, block_expert, block_first, num_blocks,
    FIXED: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    block = block_of(ids, first_place, block_expert, block_first, num_blocks, tl.program_id(1), True)
    column = tl.program_id(0) * (FIXED.columns * FIXED.span)
    operands = (hidden, hidden_scale, down, down_scale, out, pairs)
    run_block(_down_tile, operands, block, column, FIXED, ROWS)


@functools.cache
def load_table() -> dict[tuple[int, int, int, int], dict[int, Tiles]]:
    """``(experts, hidden size, expert width, block)`` to what was fastest for up to so many tokens."""
    table: dict[tuple[int, int, int, int], dict[int, Tiles]] = {}
    for row in json.loads(TABLE_PATH.read_text())["rows"]:
        key = (row["experts"], row["hidden"], row["width"], row["block"])
        table.setdefault(key, {})[row["tokens"]] = Tiles(Tile(*row["up"]), Tile(*row["down"]))
    return table


class Hopper(enum.StrEnum):
    """Kernels for Hopper."""

    PAIRS = enum.auto()
    """Pair by pair, by ``fp8_pairs_hopper.py``."""
    BLOCKS = enum.auto()
    """In blocks of many pairs of an expert, by ``fp8_experts_hopper.py``."""


Config = Tiles | Hopper


def choose_config(down: Tensor, num_tokens: int, top_k: int, block: int, dtype: torch.dtype) -> Config:
    """Choose the kernel for inputs in ``dtype`` of experts of ``down [E, H, I]``. Very few tokens, and many pairs of
    each expert, take kernels for Hopper if such kernels exist for these experts. All else takes tiles."""
    many = _MANY if block == 0 else _MANY_BY_BLOCK if down.shape[2] > 512 else _MANY_NARROW_BY_BLOCK
    if num_tokens * top_k > many * len(down) and GLUON_IS_KNOWN and fp8_experts_hopper.takes(down, block, dtype):
        return Hopper.BLOCKS
    tiles = choose_tiles(down, num_tokens, top_k, block)
    by_pair = tiles.up.rows == 1 and GLUON_IS_KNOWN and fp8_pairs_hopper.takes_pairs(down)
    return Hopper.PAIRS if by_pair else tiles


_MANY, _MANY_BY_BLOCK, _MANY_NARROW_BY_BLOCK = 16, 32, 48
"""Pairs of each expert beyond which the kernel for Hopper is faster: with a scale for each row
(``expert-shapes-fp8-many-h200.json``), by block, and by block for experts of at most 512. By block that is from some 50
pairs on where routing is even (``expert-shapes-block-many-h200.json``), and from 20 to 32 on where it is not. Every
tile that is used below is also used at a power of two of the tokens, for which the start compiles kernels."""


def choose_tiles(down: Tensor, num_tokens: int, top_k: int, block: int) -> Tiles:
    """Choose tiles: those measured for this size and at least this many tokens, else tiles by rule."""
    num_experts, hidden, width = down.shape
    tuned = load_table().get((num_experts, hidden, width, block)) if has_table(down.device) else None
    if tuned:
        return choose_tile(tuned, num_tokens)
    if block == 0 and num_tokens * top_k > 48 * num_experts and is_hopper(down.device):
        return LARGE
    return SINGLE if num_tokens <= UNGROUPED_TOKENS else fp8_moe_tiles(num_tokens * top_k, num_experts, width, block)


SINGLE = Tiles(Tile(1, 16, 128, 2, 8), Tile(1, 32, 128, 2, 4))
"""Tiles of one row, for pairs that are not grouped."""

LARGE = Tiles(Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 8, 4))
"""Tiles for many pairs of each expert with a scale for each row. The up product needs 192 KiB of shared
memory, which Hopper has."""


def fp8_moe_tiles(num_pairs: int, num_experts: int, width: int, block: int) -> Tiles:
    """Tiles for a number of pairs; ``rows`` follows the average number of pairs per expert. Pairs that hardly share
    experts are not grouped: that was faster for up to 8 tokens of Qwen3-Next. With scales of blocks, an up product
    whose tile is as wide as a block quantises hidden values itself. ``inner`` is always 128."""
    average = num_pairs / num_experts
    if average <= 0.2:
        return SINGLE
    if block:
        if average <= 8:
            return Tiles(Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 3))
        return Tiles(Tile(64, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4, 8 if width <= _NARROW else 1))
    if average <= 8:
        return Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
    if average <= 24:
        return Tiles(Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4))
    return Tiles(Tile(64, 128, 128, 8, 3), Tile(64, 128, 128, 4, 4))


_NARROW = 256
"""Widest narrow experts. A tile of their down product has two steps or less: by rule a program goes through several."""

_FIXED = Tiles(Tile(64, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4))
"""Tiles for any number of pairs where a pair's sums must not follow it. In FP8 tiles of fewer rows sum otherwise."""


@launches(fp8_fused_moe, invariant={"config": _FIXED})
def fp8_fused_moe_triton(
    x, gate_up, down, weights, ids, *, extras, shared, shared_gate, config: Config | None = None
) -> Tensor:
    """``fp8_fused_moe`` of ``weft/ops/moe``. ``config``: overrides the choice (tests and measurements)."""
    outputs = pair_outputs(x, ids, gate_up, down, extras, config)
    return sum_experts(outputs, Routed(weights, ids, shared, shared_gate))


def pair_outputs(
    x: Tensor,
    ids: Tensor,
    up: Fp8Matrix,
    down: Fp8Matrix,
    extras: ExpertExtras = NO_EXTRAS,
    config: Config | None = None,
) -> Tensor:
    """``[T * top_k, H]``: what each pair's expert makes of its token, up to the sum."""
    if config is None:
        sizes = down.weight, ids.shape[0], ids.shape[1], down.block
        # kernels for Hopper know SwiGLU alone
        config = choose_config(*sizes, x.dtype) if extras == NO_EXTRAS else choose_tiles(*sizes)
    assert ids.dtype == torch.int32
    assert all(t.is_contiguous() for t in (up.weight, up.scale, down.weight, down.scale, ids))
    if config is Hopper.BLOCKS:
        return fp8_experts_hopper.many_pairs(x, ids, up, down)
    if isinstance(config, Tiles) and config.up.rows > 1:
        return _grouped_pairs(x, ids, up, down, extras, config)
    return _single_pairs(x, ids, up, down, extras, config)


def _single_pairs(
    x: Tensor, ids: Tensor, up: Fp8Matrix, down: Fp8Matrix, extras: ExpertExtras, config: Tiles | Literal[Hopper.PAIRS]
) -> Tensor:
    """``[T * top_k, H]``: what each pair's expert makes of its token."""
    _num_experts, hidden_size, width = down.weight.shape
    hidden, out = (torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device) for size in (width, hidden_size))
    if config is Hopper.PAIRS:
        fp8_pairs_hopper.pairs_hopper_product(x, up, hidden, ids)
        fp8_pairs_hopper.pairs_hopper_product(hidden, down, out, ids)
    else:
        pairs_product(x, up, hidden, ids, config.up, extras)
        pairs_product(hidden, down, out, ids, config.down, extras)
    return out


def _grouped_pairs(
    x: Tensor, ids: Tensor, up: Fp8Matrix, down: Fp8Matrix, extras: ExpertExtras, tiles: Tiles
) -> Tensor:
    """The same, by blocks of pairs of one expert."""
    (num_experts, hidden_size, width), block = down.weight.shape, down.block
    assert tiles.up.rows == tiles.down.rows
    inputs = prepare_pass(x, up.input_scale, block=block)
    values, scales = inputs.outputs
    grouping, num_blocks = group_pairs(ids, num_experts, tiles.up.rows, inputs)
    quantize = block > 0 and tiles.up.columns % block == 0
    hidden = torch.empty((ids.numel(), width), dtype=E4M3 if quantize else x.dtype, device=x.device)
    hidden_scale = scales  # a stand-in where the up product writes no scales
    if quantize:
        hidden_scale = torch.empty((ids.numel(), width // block), dtype=torch.float32, device=x.device)
    out = torch.empty((ids.numel(), hidden_size), dtype=x.dtype, device=x.device)
    static, down_static = up.input_scale is not None, down.input_scale is not None
    fixed = hidden_size, width, ids.shape[1], block
    tile = tiles.up
    assert block % tile.columns == block % tiles.down.columns == 0, "a tile's columns share one scale"
    stages = fitting_stages(tile.stages, 128 * (tile.rows + 2 * tile.columns), x.device)
    _fp8_up_kernel[(cdiv(width, tile.columns), num_blocks)](
        values, scales, up.weight, up.scale, hidden, hidden_scale, ids, *grouping, scales.stride(-1),
        *extras.activation,
        FIXED=Fixed(*fixed, static, quantize, _TYPES[x.dtype], tile.columns, stages, 1), ROWS=tile.rows,
        num_warps=tile.warps, **early_launch(ids.device),
    )  # fmt: skip
    if not block:  # each program of the down product would do it again for its columns
        hidden, hidden_scale = quantize_inputs_triton(hidden, down.input_scale, block=0)
    tile = tiles.down
    stages = fitting_stages(tile.stages, 128 * (tile.rows * hidden.element_size() + tile.columns), x.device)
    _fp8_down_kernel[(cdiv(hidden_size, tile.columns * tile.span), num_blocks)](
        hidden, hidden_scale, down.weight, down.scale, out, ids, *grouping,
        FIXED=Fixed(*fixed, down_static, quantize, _TYPES[x.dtype], tile.columns, stages, tile.span),
        ROWS=tile.rows, num_warps=tile.warps, **early_launch(ids.device),
    )  # fmt: skip
    return out


_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
