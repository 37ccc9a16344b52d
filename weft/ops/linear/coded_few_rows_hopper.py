"""Linear layers with INT4 weights for very few rows on Hopper, in Gluon: codes become numbers in the tensor core's
registers.

Job: the products of ``coded.py`` for up to 8 rows. Owns: the kernel, and the parts of it that experts use
(``moe/coded_pairs_hopper.py``). Does not know: layers, tables.

A program computes some outputs. Warp w takes the chunks w, w + warps, ... of 128 inner elements. It loads the words of
its first chunks into registers before the previous kernel has ended. Each thread loads 16 bytes of a row side by side,
which hold the codes of its operands. Weights and inputs are permuted alike, so the same inner elements are multiplied.
Numbers do not pass through shared memory. The sums of the warps are added in order at the end.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from weft.ops.codes import CodedMatrix
from weft.ops.linear.few_rows import CodedRows
from weft.ops.linear.fp8_few_rows_hopper import bases, block_rows, log2, sums_layout
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.hopper import GluonKernel
from weft.ops.triton.sizes import cdiv

TOKENS = gl.constexpr(8)
"""Lanes for rows of inputs."""


class Fixed(NamedTuple):
    """Compile-time parameters of a kernel.

    Attributes:
        chunks, width: of the matrix.
        rows, warps, held, splits: as of ``CodedRows``.
        group: chunks that share a scale.
        gated, bias: whether gate and up rows take turns; whether there is a bias.
        plain: further weight rows, which are bfloat16.
    """

    chunks: int
    width: int
    rows: int
    warps: int
    held: int
    splits: int
    group: int
    gated: bool
    bias: bool = False
    plain: int = 0


@gluon.constexpr_function
def _words_layout(rows, warps):
    """``[warps, rows, 16]``: four threads have a row."""
    registers = bases(2, (0, 1)) + bases(1, range(3, log2(rows)))
    threads = bases(2, (2, 3)) + bases(1, range(3))
    return gl.DistributedLinearLayout(registers, threads, bases(0, range(log2(warps))), [], [warps, rows, 16])


@gluon.constexpr_function
def inputs_layout(rows, warps):
    """``[warps, rows, 32]``: one span of inputs, or of plain weight rows."""
    registers = bases(2, (0, 1, 2)) + bases(1, range(3, log2(rows)))
    threads = bases(2, (3, 4)) + bases(1, range(3))
    return gl.DistributedLinearLayout(registers, threads, bases(0, range(log2(warps))), [], [warps, rows, 32])


@gluon.jit
def _in_order(tile):
    """Permute a span, so that each thread holds its operands of the tensor core."""
    parts = tile.reshape([tile.shape[0], tile.shape[1], 4, 2, 2, 2])
    return parts.permute(0, 1, 3, 4, 2, 5).reshape([tile.shape[0], tile.shape[1], 32])


@gluon.jit
def code_pair(words):
    """Make two bfloat16 numbers, less 8, of the lowest codes of both halves of a word."""
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 codes, one, offset;
        mov.b32 one, 0x3F803F80;
        mov.b32 offset, 0xC308C308;
        lop3.b32 codes, $2, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 codes, codes, one, offset;
        mov.b32 {$0, $1}, codes;
        }""",
        "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    return low.to(gl.bfloat16, bitcast=True), high.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _words_at(words, rows, chunk, last, FIXED: gl.constexpr):
    """``[warps, rows, 16]``; zeros beyond the last chunk."""
    LAYOUT: gl.constexpr = _words_layout(FIXED.rows, FIXED.warps)
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    warp = gl.arange(0, FIXED.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    at = (chunk + warp) * (FIXED.width * 16)
    places = at[:, None, None] + (rows * 16)[None, :, None] + inner[None, None, :]
    if FIXED.chunks % (FIXED.warps * FIXED.splits) == 0:
        found = gl.load(words + places)
    else:
        found = gl.load(words + places, mask=(chunk + warp < last)[:, None, None], other=0)
    return found


@gluon.jit
def _scales_at(weight_scale, rows, chunk, last, FIXED: gl.constexpr):
    """``[warps, rows]``; zeros beyond the last chunk."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, sums_layout(FIXED.warps))
    chunks = chunk + gl.arange(0, FIXED.warps, layout=gl.SliceLayout(1, LAYOUT))
    places = (chunks // FIXED.group * FIXED.width)[:, None] + rows[None, :]
    if FIXED.chunks % (FIXED.warps * FIXED.splits) == 0:
        found = gl.load(weight_scale + places)
    else:
        found = gl.load(weight_scale + places, mask=(chunks < last)[:, None], other=0.0)
    return found.to(gl.float32)


@gluon.jit
def _inputs_at(x, x_rows, chunk, last, SPAN: gl.constexpr, FIXED: gl.constexpr):
    """``[warps, rows, 32]`` of rows that begin at ``x_rows``; zeros beyond the last chunk."""
    LAYOUT: gl.constexpr = inputs_layout(x_rows.shape[0], FIXED.warps)
    inner = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    chunks = chunk + gl.arange(0, FIXED.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    places = x + x_rows[None, :, None] + (chunks * 128 + SPAN * 32)[:, None, None] + inner[None, None, :]
    if FIXED.chunks % (FIXED.warps * FIXED.splits) == 0:
        found = gl.load(places)
    else:
        found = gl.load(places, mask=(chunks < last)[:, None, None], other=0.0)
    return found


@gluon.jit
def _add_product(numbers, inputs, sums, SUMS: gl.constexpr):
    """``sums`` plus the products of a span."""
    left = gl.convert_layout(_in_order(numbers), gl.DotOperandLayout(0, SUMS, 2))
    right = gl.convert_layout(_in_order(inputs).permute(0, 2, 1), gl.DotOperandLayout(1, SUMS, 2))
    return mma_v2(left, right, sums)


@gluon.jit
def request(words, weight_scale, block, first, last, FIXED: gl.constexpr):
    """The words and scales of a program's first chunks. They do not depend on the kernel before."""
    SUMS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, sums_layout(FIXED.warps)))
    WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, _words_layout(FIXED.rows, FIXED.warps)))
    WIDTH: gl.constexpr = FIXED.width // 2 if FIXED.gated else FIXED.width
    rows = block_rows(block, WIDTH, FIXED.rows, FIXED.gated, WORDS)
    scaled = block_rows(block, WIDTH, FIXED.rows, FIXED.gated, SUMS)
    SHARE: gl.constexpr = (FIXED.chunks + FIXED.splits - 1) // FIXED.splits
    STEPS: gl.constexpr = (SHARE + FIXED.warps - 1) // FIXED.warps
    HELD: gl.constexpr = FIXED.held if FIXED.held < STEPS else STEPS
    tiles = ()
    of_tiles = ()
    for step in gl.static_range(HELD):
        chunk = first + step * FIXED.warps
        tiles = tiles + (_words_at(words, rows, chunk, last, FIXED),)  # type: ignore[assignment]  # noqa: RUF005
        of_tiles = of_tiles + (_scales_at(weight_scale, scaled, chunk, last, FIXED),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles, of_tiles, rows, scaled


@gluon.jit
def few_rows_product(words, weight_scale, requested, x, x_rows, first, last, FIXED: gl.constexpr):
    """``[rows, tokens]`` float32: sums over the chunks from ``first`` to ``last``. ``x_rows``: where rows of ``x``
    begin."""
    tiles, of_tiles, rows, scaled = requested
    SUMS: gl.constexpr = sums_layout(FIXED.warps)
    SHARE: gl.constexpr = (FIXED.chunks + FIXED.splits - 1) // FIXED.splits
    STEPS: gl.constexpr = (SHARE + FIXED.warps - 1) // FIXED.warps
    WARPS: gl.constexpr = FIXED.warps
    ROWS: gl.constexpr = FIXED.rows
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, layout=SUMS)
    for step in gl.static_range(STEPS):
        chunk = first + step * WARPS
        if step + FIXED.held < STEPS:
            ahead = chunk + FIXED.held * WARPS
            tiles = tiles + (_words_at(words, rows, ahead, last, FIXED),)  # noqa: RUF005
            of_tiles = of_tiles + (_scales_at(weight_scale, scaled, ahead, last, FIXED),)  # noqa: RUF005
        sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, layout=SUMS)
        for span in gl.static_range(4):
            inputs = _inputs_at(x, x_rows, chunk, last, span, FIXED)
            low, high = code_pair(tiles[step] >> (4 * span))
            sums = _add_product(gl.join(low, high).reshape([WARPS, ROWS, 32]), inputs, sums, SUMS)
        acc += sums * of_tiles[step][:, :, None]
    return gl.sum(acc, 0)


@gluon.jit
def _plain_product(weight, block, x, x_rows, FIXED: gl.constexpr):
    """``[rows, tokens]`` float32 of plain rows."""
    SUMS: gl.constexpr = sums_layout(FIXED.warps)
    STEPS: gl.constexpr = (FIXED.chunks + FIXED.warps - 1) // FIXED.warps
    WARPS: gl.constexpr = FIXED.warps
    ROWS: gl.constexpr = FIXED.rows
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, inputs_layout(FIXED.rows, FIXED.warps)))
    rows = block_rows(block, FIXED.plain, FIXED.rows, False, LAYOUT).to(gl.int64) * (FIXED.chunks * 128)
    sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, layout=SUMS)
    for step in gl.static_range(STEPS):
        for span in gl.static_range(4):
            numbers = _inputs_at(weight, rows, step * WARPS, FIXED.chunks, span, FIXED)
            inputs = _inputs_at(x, x_rows, step * WARPS, FIXED.chunks, span, FIXED)
            sums = _add_product(numbers, inputs, sums, SUMS)
    return gl.sum(sums, 0)


@gluon.jit
def store(
    total, bias, out, block, num_tokens, stride_out, WIDTH: gl.constexpr, GATED: gl.constexpr, FIXED: gl.constexpr
):  # fmt: skip
    """Bias and gate, and one rounding."""
    OUTPUTS: gl.constexpr = FIXED.rows // 2 if GATED else FIXED.rows
    LAYOUT: gl.constexpr = gl.BlockedLayout([FIXED.rows // OUTPUTS, 1], [32, 1], [1, FIXED.warps], [0, 1])
    total = gl.convert_layout(total, LAYOUT)
    if FIXED.bias:
        rows = block_rows(block, WIDTH, FIXED.rows, GATED, gl.SliceLayout(1, LAYOUT))
        total += gl.load(bias + rows).to(gl.float32)[:, None]
    if GATED:
        gate, up = gl.split(total.reshape([OUTPUTS, 2, TOKENS]).permute(0, 2, 1))
        total = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, LAYOUT)
    columns = block * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    inside = (columns < WIDTH)[:, None] & (tokens < num_tokens)[None, :]
    offsets = tokens.to(gl.int64)[None, :] * stride_out + columns[:, None]
    gl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@functools.partial(GluonKernel, do_not_specialize=["num_tokens"])
def _coded_few_rows_hopper_kernel(
    x, words, weight_scale, plain_weight, bias, out, num_tokens, stride_x, stride_out, stride_part,
    FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Block ``program_id(0)`` of outputs, those of plain rows first; share ``program_id(1)`` of the inner dimension."""
    release(EARLY)
    block, split = gl.program_id(0), gl.program_id(1)
    SHARE: gl.constexpr = (FIXED.chunks + FIXED.splits - 1) // FIXED.splits
    WIDTH: gl.constexpr = FIXED.width // 2 if FIXED.gated else FIXED.width
    PLAIN: gl.constexpr = (FIXED.plain + FIXED.rows - 1) // FIXED.rows
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, inputs_layout(TOKENS, FIXED.warps)))
    x_rows = gl.minimum(gl.arange(0, TOKENS, layout=LANES), num_tokens - 1).to(gl.int64) * stride_x
    if FIXED.plain and block < PLAIN:
        wait(EARLY)
        total = _plain_product(plain_weight, block, x, x_rows, FIXED)
        store(total, bias + WIDTH, out + WIDTH, block, num_tokens, stride_out, FIXED.plain, False, FIXED)
    else:
        block -= PLAIN
        first = split * SHARE
        last = gl.minimum(first + SHARE, FIXED.chunks)
        requested = request(words, weight_scale, block, first, last, FIXED)
        wait(EARLY)
        total = few_rows_product(words, weight_scale, requested, x, x_rows, first, last, FIXED)
        store(total, bias, out + split * stride_part, block, num_tokens, stride_out, WIDTH, FIXED.gated, FIXED)


def takes(matrix: CodedMatrix) -> bool:
    """Whether the kernel exists for a matrix: symmetric INT4, whose groups are whole chunks."""
    simple = matrix.bits == 4 and not matrix.is_float and matrix.zeros is None and matrix.row_scale is None
    return simple and matrix.columns % 128 == 0 and matrix.group % 128 == 0 and matrix.scales.dtype == torch.bfloat16


def few_rows_hopper_product(
    x: Tensor, matrix: CodedMatrix, bias: Tensor | None, out: Tensor, config: CodedRows, *, silu_mul: bool = False,
    plain_weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the product of ``x [T, K]``, ``1 <= T <= 8``, into ``out``, as ``coded_product_triton``.

    Args:
        plain_weight: ``[M, K]``: out is ``[T, N + M]``, and bias ``[N + M]``.
    """
    chunks, rows, _ = matrix.words.shape
    assert x.stride(1) == 1 and out.stride(-1) == 1 and x.shape[0] <= TOKENS.value
    assert (bias is None and plain_weight is None) or config.splits == 1
    plain = 0 if plain_weight is None else plain_weight.shape[0]
    blocks = cdiv(rows // 2, config.rows // 2) if silu_mul else cdiv(rows, config.rows)
    group = (matrix.group or matrix.columns) // 128
    fixed = Fixed(
        chunks, rows, config.rows, config.warps, config.held, config.splits, group, silu_mul, bias is not None, plain
    )  # fmt: skip
    _coded_few_rows_hopper_kernel[(blocks + cdiv(plain, config.rows), config.splits)](
        x, matrix.words, matrix.scales, x if plain_weight is None else plain_weight, out if bias is None else bias, out,
        x.shape[0], x.stride(0), out.stride(-2), out.stride(0) if out.dim() == 3 else 0,
        FIXED=fixed, num_warps=config.warps, **early_launch(x.device),
    )  # fmt: skip
