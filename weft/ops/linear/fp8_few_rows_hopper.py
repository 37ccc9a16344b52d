"""Linear layers with FP8 weights for very few rows on Hopper, in Gluon: every warp quantises inputs of its own.

Job: the products of ``fp8_few_rows.py`` for up to 8 rows whose inner size the warps of a program can share evenly.
Owns: the kernel, and the parts of it that experts use (``moe/fp8_pairs_hopper.py``). Does not know: layers, tables.

A program computes some outputs. Warp w takes the groups w, w + warps, ... of 128 inner elements. It loads the weights
of a group into registers before the previous kernel has ended, then loads the inputs, quantises and multiplies. The
sums of the warps are added in order at the end. So no input is quantised twice in a program, no program waits for
another one, and a tensor core's shape is no reason to repeat a weight in several warps.

Weights are widened to float16, which holds every e4m3 number, so 128 products are summed in float32. They go from
memory to the tensor core without passing through shared memory. A thread loads 16 neighbouring numbers of a row.
Weights and inputs are permuted alike, so the same inner elements are multiplied (``_in_order``).
"""

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from weft.ops.fp8 import E4M3_MAX, SMALLEST_AMAX, Fp8Matrix
from weft.ops.linear.fp8_few_rows import MAX_HOPPER_TOKENS, HopperRows
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.hopper import GluonKernel
from weft.ops.triton.sizes import cdiv, next_power_of_2

_MAX = gl.constexpr(E4M3_MAX)
_SMALLEST = gl.constexpr(SMALLEST_AMAX)
_SHAPES = ((32, 4), (16, 8), (16, 4), (16, 16))
"""Weight rows and warps, the better ones first."""
_MOST_HELD = 64
"""Rows times groups of 128 inputs of a warp: half of a thread's registers hold them."""
_MOST_PRODUCTS = 1 << 26
"""Weights times tokens up to which the rule chooses this kernel. Beyond, the pipelined kernel was faster."""


class Fixed(NamedTuple):
    """Compile-time parameters of a kernel.

    Attributes:
        depth: the inner size.
        rows, warps: as of ``HopperRows``.
        tokens: a power of two.
        block: inputs that share a scale, and weight rows; 0: a scale for each row.
        static: one scale for all inputs, which is given.
        gated, bias: whether gate and up rows take turns; whether there is a bias.
        plain: further weight rows, which are not quantised.
    """

    depth: int
    rows: int
    warps: int
    tokens: int
    block: int
    static: bool
    gated: bool = False
    bias: bool = False
    plain: int = 0


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def bases(dim, places):
    """Bases of a layout of three dimensions: steps of powers of two along one of them."""
    return [[0] * dim + [1 << place] + [0] * (2 - dim) for place in places]


@gluon.constexpr_function
def _operand_layout(rows, warps, wide):
    """``[warps, rows, 128]`` as loaded: four threads have a row, 16 bytes side by side each (wide: of two-byte
    numbers). With fewer than eight rows several threads hold the same values."""
    vector, lanes, more = ((0, 1, 2), (3, 4), (5, 6)) if wide else ((0, 1, 2, 3), (4, 5), (6,))
    held, spread = log2(rows), min(log2(rows), 3)
    registers = bases(2, vector) + bases(2, more) + bases(1, range(3, held))
    threads = bases(2, lanes) + bases(1, range(spread)) + [[0, 0, 0]] * (3 - spread)
    return gl.DistributedLinearLayout(registers, threads, bases(0, range(log2(warps))), [], [warps, rows, 128])


@gluon.constexpr_function
def arrival_layout(tokens, warps):
    """Layout of inputs ``[warps, tokens, 128]`` while they are quantised: no two threads hold the same value."""
    spread = min(log2(tokens), 3)
    if spread == 3:
        return _operand_layout(tokens, warps, False)
    registers, threads = bases(2, range(2 + spread)), bases(2, range(2 + spread, 7)) + bases(1, range(spread))
    return gl.DistributedLinearLayout(registers, threads, bases(0, range(log2(warps))), [], [warps, tokens, 128])


@gluon.constexpr_function
def sums_layout(warps):
    """``[warps, rows, tokens]``."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def _in_order(tile, WIDE: gl.constexpr):
    """Permute the inner dimension, so that each thread holds its operands of the tensor core."""
    WARPS: gl.constexpr = tile.shape[0]
    ROWS: gl.constexpr = tile.shape[1]
    if WIDE:
        parts = tile.reshape([WARPS, ROWS, 4, 4, 2, 2, 2])
    else:
        parts = tile.reshape([WARPS, ROWS, 2, 4, 4, 2, 2])
    return parts.permute(0, 1, 2, 4, 5, 3, 6).reshape([WARPS, ROWS, 128])


@gluon.jit
def _products(weights, inputs, WIDE: gl.constexpr):
    """``[warps, rows, tokens]``: 128 products of each summed."""
    WARPS: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    TOKENS: gl.constexpr = inputs.shape[1]
    SUMS: gl.constexpr = sums_layout(WARPS)
    left = gl.convert_layout(_in_order(weights, WIDE), gl.DotOperandLayout(0, SUMS, 2))
    right = gl.convert_layout(_in_order(inputs, WIDE).permute(0, 2, 1), gl.DotOperandLayout(1, SUMS, 2))
    return mma_v2(left, right, gl.zeros([WARPS, ROWS, TOKENS], gl.float32, layout=SUMS))


@gluon.jit
def block_rows(block, width, ROWS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Compute the weight rows of a block; see ``rows_of_block`` of ``few_rows.py``."""
    lanes = gl.arange(0, ROWS, layout=LAYOUT)
    if GATED:
        rows = gl.minimum(block * (ROWS // 2) + lanes // 2, width - 1) + lanes % 2 * width
    else:
        rows = gl.minimum(block * ROWS + lanes, width - 1)
    return rows


@gluon.jit
def _load_tiles(base, row_offsets, FIXED: gl.constexpr, LAYOUT: gl.constexpr):
    """All groups of some rows: a tuple of ``[warps, rows, 128]``."""
    WARPS: gl.constexpr = FIXED.warps
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    inner = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    places = base + row_offsets[None, :, None] + warp[:, None, None] * 128 + inner[None, None, :]
    tiles = ()
    for step in gl.static_range(FIXED.depth // (128 * WARPS)):
        tiles = tiles + (gl.load(places + step * (128 * WARPS)),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@gluon.jit
def load_weights(weight, block, width, FIXED: gl.constexpr, GATED: gl.constexpr, WIDE: gl.constexpr):
    """A program's weights."""
    LAYOUT: gl.constexpr = _operand_layout(FIXED.rows, FIXED.warps, WIDE)
    rows = block_rows(block, width, FIXED.rows, GATED, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return _load_tiles(weight, rows.to(gl.int64) * FIXED.depth, FIXED, LAYOUT)


@gluon.jit
def load_inputs(x, num_tokens, stride_x, FIXED: gl.constexpr, LAYOUT: gl.constexpr):
    """All tokens; lanes without one have the last."""
    TOKENS: gl.constexpr = FIXED.tokens
    lanes = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return _load_tiles(x, gl.minimum(lanes, num_tokens - 1).to(gl.int64) * stride_x, FIXED, LAYOUT)


@gluon.jit
def load_scales(weight_scale, block, width, FIXED: gl.constexpr):
    """Load the scales of a program's weights: a tuple of ``[warps, rows]``, one for each step, or of one ``[rows]``."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, sums_layout(FIXED.warps))
    rows = block_rows(block, width, FIXED.rows, FIXED.gated, gl.SliceLayout(0, LAYOUT))
    WARPS: gl.constexpr = FIXED.warps
    scales = ()
    if FIXED.block:
        warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
        places = (rows // FIXED.block * (FIXED.depth // 128))[None, :] + warp[:, None]
        for step in gl.static_range(FIXED.depth // (128 * WARPS)):
            found = gl.load(weight_scale + places + step * WARPS)
            scales = scales + (found,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        scales = (gl.load(weight_scale + rows),)  # type: ignore[assignment]
    return scales


@gluon.jit
def _scale_of(amax):
    """Compute the scale from the largest magnitude."""
    return gl.maximum(amax, _SMALLEST) / _MAX


@gluon.jit
def quantized_product(weights, scales, inputs, input_scale, FIXED: gl.constexpr):
    """``[rows, tokens]`` of tiles that have been loaded. With a scale of their own no inputs are too large, and
    the reciprocal gives the bits of a division here: ``fp8/quantize.py`` has the GPU divide approximately too."""
    WARPS: gl.constexpr = FIXED.warps
    ROWS: gl.constexpr = FIXED.rows
    TOKENS: gl.constexpr = FIXED.tokens
    SUMS: gl.constexpr = sums_layout(WARPS)
    STEPS: gl.constexpr = FIXED.depth // (128 * WARPS)
    if FIXED.static:
        of_inputs = gl.load(input_scale)
    elif not FIXED.block:
        amax = gl.max(gl.abs(inputs[0].to(gl.float32)), 2)
        for step in gl.static_range(1, STEPS):
            amax = gl.maximum(amax, gl.max(gl.abs(inputs[step].to(gl.float32)), 2))
        of_inputs = _scale_of(gl.max(amax, 0))
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, layout=SUMS)
    for step in gl.static_range(STEPS):
        wide = inputs[step].to(gl.float32)
        if FIXED.static:
            values = gl.minimum(gl.maximum(wide / of_inputs, -_MAX), _MAX)
        elif FIXED.block:
            of_group = _scale_of(gl.max(gl.abs(wide), 2))
            values = wide * (1.0 / of_group)[:, :, None]
        else:
            values = wide * (1.0 / of_inputs)[None, :, None]
        values = gl.convert_layout(values.to(gl.float8e4nv), _operand_layout(TOKENS, WARPS, False))
        sums = _products(weights[step].to(gl.float16), values.to(gl.float16), False)
        if FIXED.block:
            sums *= scales[step][:, :, None]
            if not FIXED.static:
                sums *= gl.convert_layout(of_group, gl.SliceLayout(1, SUMS))[:, None, :]
        acc += sums
    total = gl.sum(acc, 0)
    if not FIXED.block:
        total *= gl.convert_layout(scales[0], gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
        if not FIXED.static:
            total *= gl.convert_layout(of_inputs, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    if FIXED.static:
        total *= of_inputs
    return total


@gluon.jit
def store_outputs(
    total, bias, out, block, num_tokens, width, stride_out, FIXED: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Bias and gate, and one rounding."""
    TOKENS: gl.constexpr = FIXED.tokens
    OUTPUTS: gl.constexpr = FIXED.rows // 2 if GATED else FIXED.rows
    LAYOUT: gl.constexpr = gl.BlockedLayout([FIXED.rows // OUTPUTS, 1], [32, 1], [1, FIXED.warps], [0, 1])
    total = gl.convert_layout(total, LAYOUT)
    if FIXED.bias:
        rows = block_rows(block, width, FIXED.rows, GATED, gl.SliceLayout(1, LAYOUT))
        total += gl.load(bias + rows).to(gl.float32)[:, None]
    if GATED:
        gate, up = gl.split(total.reshape([OUTPUTS, 2, TOKENS]).permute(0, 2, 1))
        total = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, LAYOUT)
    columns = block * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    inside = (columns < width)[:, None] & (tokens < num_tokens)[None, :]
    offsets = tokens.to(gl.int64)[None, :] * stride_out + columns[:, None]
    gl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _plain_outputs(
    x, weight, bias, out, block, num_tokens, stride_x, stride_out, FIXED: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    """A block of outputs of plain rows."""
    weights = load_weights(weight, block, FIXED.plain, FIXED, False, True)
    wait(EARLY)
    inputs = load_inputs(x, num_tokens, stride_x, FIXED, _operand_layout(FIXED.tokens, FIXED.warps, True))
    acc = _products(weights[0], inputs[0], True)
    for step in gl.static_range(1, FIXED.depth // (128 * FIXED.warps)):
        acc += _products(weights[step], inputs[step], True)
    store_outputs(gl.sum(acc, 0), bias, out, block, num_tokens, FIXED.plain, stride_out, FIXED, False)


@functools.partial(GluonKernel, do_not_specialize=["num_tokens"])
def _fp8_few_rows_hopper_kernel(
    x, input_scale, weight, weight_scale, plain_weight, bias, out, num_tokens, width, stride_x, stride_out,
    FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A block of outputs; those of plain rows come last."""
    release(EARLY)
    block = gl.program_id(0)
    blocks = gl.num_programs(0) - (FIXED.plain + FIXED.rows - 1) // FIXED.rows
    if FIXED.plain and block >= blocks:
        block -= blocks
        _plain_outputs(
            x, plain_weight, bias + width, out + width, block, num_tokens, stride_x, stride_out, FIXED, EARLY
        )  # fmt: skip
    else:
        weights = load_weights(weight, block, width, FIXED, FIXED.gated, False)
        scales = load_scales(weight_scale, block, width, FIXED)
        wait(EARLY)
        inputs = load_inputs(x, num_tokens, stride_x, FIXED, arrival_layout(FIXED.tokens, FIXED.warps))
        total = quantized_product(weights, scales, inputs, input_scale, FIXED)
        store_outputs(total, bias, out, block, num_tokens, width, stride_out, FIXED, FIXED.gated)


def hopper_config(rows: int, inner: int, tokens: int) -> HopperRows | None:
    """Choose the configuration of a product of a few rows, by rule.

    Returns None if the kernel does not support the product, or is slower because too many programs quantise inputs.

    Args:
        rows, inner: of the weight.
        tokens: a power of two.
    """
    if tokens > MAX_HOPPER_TOKENS or tokens * rows * inner > _MOST_PRODUCTS:
        return None
    for held, warps in _SHAPES:
        if registers_hold(held, warps, inner):
            return HopperRows(held, warps, 80 if tokens <= 4 and held * inner <= 64 * _MOST_HELD * warps else None)
    return None


def registers_hold(rows: int, warps: int, inner: int) -> bool:
    """Whether the warps share the inner dimension evenly, and a thread's registers hold its part of the weights."""
    return inner % (128 * warps) == 0 and rows * inner <= 128 * _MOST_HELD * warps


def few_rows_hopper_product(
    x: Tensor, matrix: Fp8Matrix, bias: Tensor | None, out: Tensor, config: HopperRows,
    *, silu_mul: bool = False, plain_weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the product of ``x [T, K]``, ``1 <= T <= 8``, into ``out [T, N]`` (``[T, N / 2]`` with ``silu_mul``).

    Args:
        plain_weight: ``[M, K]`` in x's dtype, of two bytes: out is ``[T, N + M]``, and bias ``[N + M]``.
    """
    weight, weight_scale, input_scale, block = matrix
    num_tokens, (rows, inner) = x.shape[0], weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and weight_scale.is_contiguous() and out.stride(1) == 1
    assert inner % (128 * config.warps) == 0
    width = rows // 2 if silu_mul else rows
    plain = 0 if plain_weight is None else plain_weight.shape[0]
    programs = cdiv(width, config.rows // 2 if silu_mul else config.rows) + cdiv(plain, config.rows)
    fixed = Fixed(
        inner, config.rows, config.warps, next_power_of_2(num_tokens), block, input_scale is not None, silu_mul,
        bias is not None, plain,
    )  # fmt: skip
    _fp8_few_rows_hopper_kernel[(programs,)](
        x, x if input_scale is None else input_scale, weight, weight_scale, x if plain_weight is None else plain_weight,
        out if bias is None else bias, out, num_tokens, width, x.stride(0), out.stride(0),
        FIXED=fixed, num_warps=config.warps, maxnreg=config.max_registers, **early_launch(x.device),
    )  # fmt: skip
