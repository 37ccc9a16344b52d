"""Linear layers with FP8 weights for a few rows: the weight streams through once, and inputs are quantised on arrival.

Job: the products of ``fp8.py`` for up to 64 rows, one launch. Owns: the kernel, and what it does by rule where
nothing was measured. Does not know: layers, tables.

A program quantises the inputs that it multiplies while it waits for weights. All programs of a launch repeat this work
on the same few rows. A separate pass would be another kernel in the chain of a decode step. The separate pass runs only
where there are more rows than a program can quantise in that time.

Tensor cores on Hopper add e4m3 products up with fewer bits than float32 has. So 128 inputs are multiplied at a time,
and these sums are added up in float32, where scales by block have their place anyway.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.fp8.quantize import quantize_inputs_triton, scale_of, to_e4m3
from weft.ops.linear.few_rows import MAX_BLOCKS, add_splits, load_inner, rows_of_block, workspace
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

MAX_TOKENS = 64
"""The kernel is for at most this many."""
MAX_HOPPER_TOKENS = 8
"""Most rows of the kernel in ``fp8_few_rows_hopper.py``."""
_HELD_BYTES = 32768
"""Weights that a program of four warps holds in registers before they are widened."""
_HELD_WEIGHT = 1 << 21
"""Bytes of the largest weight that programs hold in registers by rule."""
_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
_PIPELINES = {8: (64, 4, 1056), 16: (64, 4, 528), 32: (64, 6, 264), 64: (64, 6, 264)}
"""Largest number of tokens to weight rows, stages and programs: the fastest of several (``fp8-rules-h200.json``, and
for 32 and 64 tokens ``fp8-few-rows-pipelines-h200.json``)."""
_PIPELINES_BY_BLOCK = {8: (128, 3, 528), 16: (128, 3, 264), 32: (128, 3, 264), 64: (64, 4, 264)}
"""The same with scales by block."""
_SHORT_PIPELINES = {32: (range(201), range(397, 529)), 64: (range(265, 1 << 31),)}
"""Numbers of tokens to numbers of programs for which four stages are faster than six (``shapes-few-after-h200.json``).
With six, two programs of 64 tokens or three of 32 fit on a multiprocessor, and a few more would begin a second wave."""
_OWN_TOKENS, _OWN_INNER, _OWN_WEIGHT = 2, 8192, 1 << 23
"""Most rows, inputs of a row, and bytes of a weight, where a program finds the rows' largest magnitudes itself."""
_LEAST_LANES = 4
"""Least lanes for rows whose inputs are given in e4m3."""
_OWN_GROUP_TOKENS = 16
"""Most rows that a program quantises itself where each group of inputs has a scale, or all inputs have one."""
_OWN_STATIC_WEIGHT = 30 << 20
"""Where all inputs have one scale, bytes of the largest weight whose programs quantise 9 to 16 rows; up to 8 rows
``_OWN_WEIGHT`` (``shapes-static-before-h200.json``, ``shapes-static-pass-h200.json``)."""


class FewRows(NamedTuple):
    """How a product with few rows is computed.

    Attributes:
        held: the weight is loaded into registers at once, and as float16 multiplied; else it streams through a pipeline
            and is multiplied as it is.
        rows: weight rows per program (for a gated product half of them gate rows, half up rows).
        warps, stages: per program; stages of the pipeline.
        splits: programs that share the inner dimension.
    """

    held: bool
    rows: int
    warps: int
    stages: int
    splits: int


class HopperRows(NamedTuple):
    """How a product with very few rows is computed by ``fp8_few_rows_hopper.py``.

    Attributes:
        rows: weight rows per program, 16 or 32 (for a gated product half of them gate rows, half up rows).
        warps: of a program; the inner size is a multiple of 128 times as many.
        max_registers: a limit per thread.
    """

    rows: int
    warps: int
    max_registers: int | None


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        depth: the inner size.
        span: inner elements of one split; a multiple of 128.
        splits, rows, held, stages: as of ``FewRows``.
        tokens: a power of two.
        block: inputs that share a scale, and weight rows; 0: a scale for each row.
        scales: scales of the inputs. ``own``: each program computes them. ``static``: one scale is given, and inputs
            may be e4m3. ``given``: inputs are e4m3 with scales by row, or by group and row.
        gated, bias: whether gate and up rows take turns; whether there is a bias.
        even: all splits have as much to do.
        uniform: with scales by block, all even rows of a program have one block's scale, and all odd ones.
    """

    depth: int
    span: int
    splits: int
    rows: int
    held: bool
    stages: int
    tokens: int
    block: int
    scales: str
    gated: bool
    bias: bool
    even: bool
    uniform: bool


@triton.jit
def _row_scales(x_rows, scales, tokens, FIXED: tl.constexpr):
    """``[tokens]``: the scales of whole rows. Scales of groups are found with each tile instead."""
    TOKENS: tl.constexpr = FIXED.tokens
    DEPTH: tl.constexpr = FIXED.depth
    if FIXED.scales == "given" and FIXED.block == 0:
        found = tl.load(scales + tokens)
    elif FIXED.scales == "static":
        found = tl.load(scales + tokens * 0)
    else:
        amax = tl.zeros([TOKENS], dtype=tl.float32)
        if FIXED.block == 0:
            for start in tl.static_range(0, DEPTH, 1024):
                k = start + tl.arange(0, 1024)
                wide = tl.load(x_rows + k[:, None], mask=(k < DEPTH)[:, None], other=0.0).to(tl.float32)
                amax = tl.maximum(amax, tl.max(tl.abs(wide), 0))
        found = scale_of(amax)
    return found


@triton.jit
def _block_scales(weight_scale, block, rows, width, k, FIXED: tl.constexpr):
    """Load scales by block of a program's weights at inner element ``k``: of even rows and of odd rows.

    Both are scalars where even rows share a block and odd rows share one; else both are the scales of all rows.
    """
    GROUPS: tl.constexpr = (FIXED.depth + 127) // 128
    step = tl.minimum(k // 128, GROUPS - 1)  # beyond the end sums are zero
    if FIXED.uniform:
        OUTPUTS: tl.constexpr = FIXED.rows // 2 if FIXED.gated else FIXED.rows
        first = block * OUTPUTS
        even = tl.load(weight_scale + first // 128 * GROUPS + step)
        odd = tl.load(weight_scale + (first + width) // 128 * GROUPS + step) if FIXED.gated else even
    else:
        even = tl.load(weight_scale + rows // 128 * GROUPS + step)
        odd = even
    return even, odd


@triton.jit
def _products(weight_tile, x_tile, of_inputs, group_scales, stride_group, of_weights, k, FIXED: tl.constexpr):
    """``[rows, tokens]``: 128 products of each summed, and scaled where scales are by block.

    Args:
        of_inputs: the scales of whole rows.
        group_scales: where the first group's scales of given inputs are.
        of_weights: the scales of even and of odd weight rows, where scales are by block.
    """
    BLOCK: tl.constexpr = FIXED.block
    values = x_tile
    if x_tile.dtype != tl.float8e4nv:
        wide = x_tile.to(tl.float32)
        if BLOCK and FIXED.scales == "own":
            of_inputs = scale_of(tl.max(tl.abs(wide), 0))
        values = to_e4m3(wide, of_inputs[None, :])
    if FIXED.held:
        sums = tl.dot(weight_tile.to(tl.float16), values.to(tl.float16))
    else:
        sums = tl.dot(weight_tile, values)
    if BLOCK:
        if FIXED.scales == "given":
            of_inputs = tl.load(group_scales + tl.minimum(k // 128, (FIXED.depth - 1) // 128) * stride_group)
        even, odd = of_weights
        if FIXED.uniform and not FIXED.gated:
            sums = sums * (of_inputs * even)[None, :]
        else:
            lanes = tl.arange(0, FIXED.rows)
            sums = sums * tl.where(lanes % 2 == 0, even, odd)[:, None] * of_inputs[None, :]
    return sums


@jit(do_not_specialize=["num_tokens", "stride_group"])
def _fp8_few_rows_kernel(
    x, scales, weight, weight_scale, bias, out, partial, arrivals, num_tokens, width, stride_x, stride_group,
    stride_out, stride_part, FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(0)`` of outputs, share ``program_id(1)`` of the inner dimension."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    SPAN: tl.constexpr = FIXED.span
    TOKENS: tl.constexpr = FIXED.tokens
    ROWS: tl.constexpr = FIXED.rows
    first = split * SPAN
    out += split * stride_part
    rows = rows_of_block(block, width, ROWS, FIXED.gated)
    weight_rows = weight + rows.to(tl.int64)[:, None] * FIXED.depth
    inner = tl.arange(0, 128)
    release(EARLY)
    tiles = ()
    if FIXED.held:
        for step in tl.static_range(SPAN // 128):
            k = first + step * 128 + inner
            tile = load_inner(weight_rows + k[None, :], (k < FIXED.depth)[None, :], FIXED.even)
            tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    wait(EARLY)
    if TOKENS > 32:  # lanes without a token load all of them in turn: one place of the cache would be waited for
        tokens = tl.arange(0, TOKENS) % num_tokens
    else:
        tokens = tl.minimum(tl.arange(0, TOKENS), num_tokens - 1)
    x_rows = x + tokens.to(tl.int64)[None, :] * stride_x
    of_inputs = _row_scales(x_rows, scales, tokens, FIXED)
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    if FIXED.held:
        inputs = ()
        for step in tl.static_range(SPAN // 128):  # all of them before the first product
            k = first + step * 128 + inner
            tile = load_inner(x_rows + k[:, None], (k < FIXED.depth)[:, None], FIXED.even)
            inputs = inputs + (tile,)  # type: ignore[assignment]  # noqa: RUF005
        for step in tl.static_range(SPAN // 128):
            k = first + step * 128
            of_weights = weight_scale, weight_scale
            if FIXED.block:
                of_weights = _block_scales(weight_scale, block, rows, width, k, FIXED)
            acc += _products(tiles[step], inputs[step], of_inputs, scales + tokens, stride_group, of_weights, k, FIXED)
    else:
        of_weights = weight_scale, weight_scale
        if FIXED.block:
            of_weights = _block_scales(weight_scale, block, rows, width, first, FIXED)
        for start in tl.range(0, SPAN, 128, num_stages=FIXED.stages):
            k = first + start
            if FIXED.block:  # a step ahead
                of_next = _block_scales(weight_scale, block, rows, width, k + 128, FIXED)
            columns = k + inner
            weight_tile = load_inner(weight_rows + columns[None, :], (columns < FIXED.depth)[None, :], FIXED.even)
            x_tile = load_inner(x_rows + columns[:, None], (columns < FIXED.depth)[:, None], FIXED.even)
            acc += _products(weight_tile, x_tile, of_inputs, scales + tokens, stride_group, of_weights, k, FIXED)
            if FIXED.block:
                of_weights = of_next
    if FIXED.block == 0:
        acc = acc * tl.load(weight_scale + rows)[:, None] * of_inputs[None, :]
    add_splits(
        acc, bias, out, partial, arrivals, block, block, split, num_tokens, width, stride_out,
        FIXED.splits, TOKENS, ROWS, FIXED.gated, FIXED.bias,
    )  # fmt: skip


def few_rows_config(rows: int, inner: int, tokens: int, block: int) -> FewRows:
    """Configuration of a product of up to 64 rows that no table has.

    Weights stream through a pipeline. Only small weights are held in registers. At 4 MB that makes no difference. From
    10 MB on it takes 2 to 7 times as long, measured on an H200 for 13 weights (``fp8-rules-h200.json``).

    Args:
        rows, inner: of the weight.
        tokens: a power of two.
        block: inputs that share a scale; 0: a scale for each row.
    """
    steps = cdiv(inner, 128)
    if tokens <= 16 and rows * inner <= _HELD_WEIGHT:
        splits = max(min(steps, cdiv(_PROGRAMS, cdiv(rows, 16))), cdiv(steps * 128 * 16, _HELD_BYTES))
        return FewRows(True, 16, 4, 4, cdiv(steps, cdiv(steps, splits)))
    height, stages, programs = (_PIPELINES_BY_BLOCK if block else _PIPELINES)[max(tokens, 8)]
    blocks = cdiv(rows, height)
    splits = max(1, min(steps, round(programs / blocks))) if blocks <= MAX_BLOCKS else 1
    splits = cdiv(steps, cdiv(steps, splits))
    if tokens >= 32 and not block and any(blocks * splits in few for few in _SHORT_PIPELINES[tokens]):
        stages = 4
    return FewRows(False, height, 4, stages, splits)


def _quantizes_itself(tokens: int, rows: int, inner: int, block: int, *, static: bool) -> bool:
    """Whether each program quantises the inputs that it multiplies, instead of a pass before."""
    if static:
        limit = _OWN_WEIGHT if tokens <= 8 else _OWN_STATIC_WEIGHT
        return tokens <= _OWN_GROUP_TOKENS and rows * inner <= limit
    if block:
        return tokens <= _OWN_GROUP_TOKENS
    return tokens <= _OWN_TOKENS and inner <= _OWN_INNER and rows * inner <= _OWN_WEIGHT


def few_rows_product(
    x: Tensor, matrix: Fp8Matrix, bias: Tensor | None, out: Tensor, config: FewRows, *, silu_mul: bool
) -> None:
    """Write the product of ``x [T, K]``, ``1 <= T <= 64``, into ``out [T, N]`` (``[T, N / 2]`` with ``silu_mul``), or
    the sums of each split into ``[splits, T, N]`` float32."""
    weight, weight_scale, input_scale, block = matrix
    num_tokens, (rows, inner) = x.shape[0], weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and weight_scale.is_contiguous() and out.stride(-1) == 1
    tokens, width = next_power_of_2(num_tokens), rows // 2 if silu_mul else rows
    scales, kind = (x, "own") if input_scale is None else (input_scale, "static")
    if not _quantizes_itself(tokens, rows, inner, block, static=input_scale is not None):
        x, scales = quantize_inputs_triton(x, input_scale, block=block)
        kind, tokens = "given" if input_scale is None else kind, max(tokens, _LEAST_LANES)
    blocks = cdiv(width, config.rows // 2 if silu_mul else config.rows)
    to_add = config.splits if out.dim() == 2 else 1
    partial, arrivals = workspace(blocks, to_add, config.rows, tokens, out)
    span = cdiv(cdiv(inner, 128), config.splits) * 128
    stages = config.stages if x.dtype == E4M3 else min(config.stages, 4)  # inputs of two bytes need twice the room
    fixed = Fixed(
        inner, span, to_add, config.rows, config.held, stages, tokens, block, kind, silu_mul,
        bias is not None, inner == span * config.splits, not silu_mul or width % 128 == 0,
    )  # fmt: skip
    _fp8_few_rows_kernel[(blocks, config.splits)](
        x, scales, weight, weight_scale, out if bias is None else bias, out, partial, arrivals, num_tokens, width,
        x.stride(0), scales.stride(-1) if kind == "given" else 0, out.stride(-2),
        out.stride(0) if out.dim() == 3 else 0,
        FIXED=fixed, num_warps=config.warps, **early_launch(x.device),
    )  # fmt: skip
