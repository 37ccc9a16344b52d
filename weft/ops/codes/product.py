"""Products with coded weights in a kernel: codes become numbers in registers, beside the tensor cores.

Job: the loop that dense layers and experts share. Does not know: outputs, tokens' experts, grids.

A program multiplies ``ROWS`` weight rows with up to ``TOKENS`` rows of inputs, chunk by chunk. A shift and a mask take
the codes of one span out of all words of a chunk. In two bytes a code is put below the exponent of a constant: one
instruction makes two numbers out of a word, and another subtracts the zero from both. All numbers of a group are then
multiplied at once, so that the tensor cores are awaited once. The scale is applied to the sums.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from weft.ops.codes import CodedMatrix
from weft.ops.triton.sizes import precision


class Fixed(NamedTuple):
    """Compile-time parameters of a product.

    Attributes:
        columns, width: of the matrix, K and N.
        group: weights of a row that share a scale; 0: all.
        bits, is_float: of a code, as ``CodedMatrix`` says.
        span: neighbouring weights in the same bits.
        rows, tokens: weight rows and rows of inputs of a program.
        stages: of the pipeline.
        fast: use instructions for two numbers at once, which the interpreter does not know.
        precision: of products of float32 operands.
    """

    columns: int
    width: int
    group: int
    bits: int
    is_float: bool
    span: int
    rows: int
    tokens: int
    stages: int
    fast: bool
    precision: str


def fixed_of(matrix: CodedMatrix, x: Tensor, *, rows: int, tokens: int, stages: int) -> Fixed:
    """The compile-time parameters of a product of ``x`` with a tile of ``rows`` and ``tokens``."""
    fast = x.element_size() == 2 and not knobs.runtime.interpret
    width = matrix.words.shape[-2]
    return Fixed(
        matrix.columns, width, matrix.group, matrix.bits, matrix.is_float, matrix.packing.span, rows, tokens, stages,
        fast, precision(x),
    )  # fmt: skip


def operands_of(matrix: CodedMatrix) -> tuple[Tensor | None, ...]:
    """The tensors of a matrix as the kernels take them."""
    tensors = matrix.words, matrix.scales, matrix.zeros, matrix.row_scale
    assert all(t is None or t.is_contiguous() for t in tensors)
    return tensors


def _integer_instructions(dtype: str, mask: str, constant: str, one: str) -> tl.constexpr:
    """Put two codes below the exponent of ``constant``, and add the offset, in a word of two ``dtype``."""
    return tl.constexpr(f"""{{
    .reg .b32 codes, one;
    mov.b32 one, {one};
    lop3.b32 codes, $2, {mask}, {constant}, 0xEA;
    fma.rn.{dtype}x2 codes, codes, one, $3;
    mov.b32 {{$0, $1}}, codes;
}}""")


def _float_instructions(dtype: str, shift: int, mask: str, factor: str) -> tl.constexpr:
    """Move sign and magnitude of two FP4 codes to where ``dtype`` has them, and multiply by the ratio of biases."""
    return tl.constexpr(f"""{{
    .reg .b32 sign, rest, factor, none;
    shl.b32 sign, $2, 12;
    shl.b32 rest, $2, {shift};
    and.b32 rest, rest, {mask};
    lop3.b32 rest, sign, 0x80008000, rest, 0xEA;
    mov.b32 factor, {factor};
    mov.b32 none, 0x80008000;
    fma.rn.{dtype}x2 rest, rest, factor, none;
    mov.b32 {{$0, $1}}, rest;
}}""")


def _fp8_instructions(dtype: str, shift: int, factor: str) -> tl.constexpr:
    """Do what ``_float_instructions`` does for FP8 codes. Adding 1 to a magnitude of 0x7f sets bit 7. Spread over the
    half of a word, this bit makes a NaN of the term that is added."""
    return tl.constexpr(f"""{{
    .reg .b32 sign, rest, term, factor;
    shl.b32 sign, $2, 8;
    and.b32 rest, $2, 0x007F007F;
    add.u32 term, rest, 0x00010001;
    prmt.b32 term, term, term, 0xAA88;
    shl.b32 rest, rest, {shift};
    lop3.b32 rest, sign, 0x80008000, rest, 0xEA;
    mov.b32 factor, {factor};
    fma.rn.{dtype}x2 rest, rest, factor, term;
    mov.b32 {{$0, $1}}, rest;
}}""")


_BF16_INT4 = _integer_instructions("bf16", "0x000F000F", "0x43004300", "0x3F803F80")
_F16_INT4 = _integer_instructions("f16", "0x000F000F", "0x64006400", "0x3C003C00")
_F16_INT8 = _integer_instructions("f16", "0x00FF00FF", "0x64006400", "0x3C003C00")
_BF16_FP4 = _float_instructions("bf16", 6, "0x01C001C0", "0x7E807E80")
_F16_FP4 = _float_instructions("f16", 9, "0x0E000E00", "0x74007400")
_BF16_FP8 = _fp8_instructions("bf16", 4, "0x7B807B80")
_F16_FP8 = _fp8_instructions("f16", 7, "0x5C005C00")


@triton.jit
def _pairs(codes, offset, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Two numbers of each word by ``PTX``."""
    low, high = tl.inline_asm_elementwise(
        PTX, "=h,=h,r,r", [codes, offset], dtype=(tl.int16, tl.int16), is_pure=True, pack=1
    )
    return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)


@triton.jit
def _fast_offset(zero, DTYPE: tl.constexpr):
    """Compute the term of the fast instructions: minus the zero and minus the constant, in both halves of a word."""
    if tl.bfloat16 == DTYPE:
        both = zero | (zero << 16) | -0x3CFF3D00  # 0xC300C300
    else:
        both = zero | (zero << 16) | -0x1BFF1C00  # 0xE400E400
    return both


@triton.jit
def numbers_of(words, zero, BEGIN: tl.constexpr, COUNT: tl.constexpr, FIXED: tl.constexpr, DTYPE: tl.constexpr):
    """``[ROWS, COUNT * SPAN]``: the numbers of ``COUNT`` spans from ``BEGIN`` on of a chunk's ``words [ROWS, SPAN /
    2]``, less ``zero [ROWS]``."""
    shifts = (BEGIN + tl.arange(0, COUNT)) * FIXED.bits
    codes = words[:, None, :] >> shifts[None, :, None]
    zero = zero[:, None, None]
    if FIXED.fast and (FIXED.bits == 4 or FIXED.is_float or tl.float16 == DTYPE):
        offset = _fast_offset(zero, DTYPE)
        if FIXED.is_float and FIXED.bits == 8 and tl.bfloat16 == DTYPE:
            low, high = _pairs(codes, offset, _BF16_FP8, DTYPE)
        elif FIXED.is_float and FIXED.bits == 8:
            low, high = _pairs(codes, offset, _F16_FP8, DTYPE)
        elif FIXED.is_float and tl.bfloat16 == DTYPE:
            low, high = _pairs(codes, offset, _BF16_FP4, DTYPE)
        elif FIXED.is_float:
            low, high = _pairs(codes, offset, _F16_FP4, DTYPE)
        elif FIXED.bits == 8:
            low, high = _pairs(codes, offset, _F16_INT8, DTYPE)
        elif tl.bfloat16 == DTYPE:
            low, high = _pairs(codes, offset, _BF16_INT4, DTYPE)
        else:
            low, high = _pairs(codes, offset, _F16_INT4, DTYPE)
    else:
        MASK: tl.constexpr = (1 << FIXED.bits) - 1
        low = _number(codes & MASK, zero, FIXED.is_float, FIXED.bits).to(DTYPE)
        high = _number((codes >> 16) & MASK, zero, FIXED.is_float, FIXED.bits).to(DTYPE)
    return tl.reshape(tl.join(low, high), [words.shape[0], COUNT * FIXED.span])


@triton.jit
def _number(code, zero, IS_FLOAT: tl.constexpr, BITS: tl.constexpr):
    """The number of a code in float32. FP4 and FP8 have their bits where float16 has them, and another bias."""
    if IS_FLOAT and BITS == 8:
        bits = ((code & 127) << 7) | ((code & 128) << 8)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        number = tl.where((code & 127) == 127, float("nan"), number)
    elif IS_FLOAT:
        bits = ((code & 7) << 9) | ((code & 8) << 12)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        number = (code - zero).to(tl.float32)
    return number


@triton.jit
def _scale_at(scales, place, FIXED: tl.constexpr):
    """Float32 scales at ``place``, as ``CodedMatrix`` says."""
    stored = tl.load(scales + place)
    if stored.dtype == tl.uint8:
        if FIXED.span == 16:
            half = (stored.to(tl.int16) & 127) << 7
            scale = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            scale = tl.maximum(stored.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
            if FIXED.bits == 8:
                scale = tl.where(stored == 255, float("nan"), scale)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _zero_at(zeros, place, FIXED: tl.constexpr):
    """Codes of zero at ``place``."""
    if zeros is None:
        zero = tl.full([place.shape[0]], 1 << (FIXED.bits - 1), dtype=tl.int32)
    else:
        zero = tl.load(zeros + place).to(tl.int32)
    return zero


@triton.jit
def shared_at(scales, zeros, base, chunk, rows, FIXED: tl.constexpr):
    """Four scales and four zeros ``[ROWS]`` of a chunk's groups, behind ``base`` others. If the chunk has fewer groups,
    the last ones repeat."""
    CHUNK: tl.constexpr = FIXED.span * (16 // FIXED.bits)
    GROUP: tl.constexpr = FIXED.group if FIXED.group > 0 else FIXED.columns
    LAST: tl.constexpr = (FIXED.columns + GROUP - 1) // GROUP - 1
    found = ()
    for step in tl.static_range(4):
        group = tl.minimum((chunk * CHUNK + min(step * GROUP, CHUNK - 1)) // GROUP, LAST)
        found = found + (_scale_at(scales, base + group * FIXED.width + rows, FIXED),)  # type: ignore[assignment]  # noqa: RUF005
    for step in tl.static_range(4):
        group = tl.minimum((chunk * CHUNK + min(step * GROUP, CHUNK - 1)) // GROUP, LAST)
        found = found + (_zero_at(zeros, base + group * FIXED.width + rows, FIXED),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def request_words(words, rows, first, last, FIXED: tl.constexpr):
    """Ask the L2 cache for a pipeline's first words. They do not depend on the kernel before."""
    for step in tl.static_range(FIXED.stages - 1):
        chunk = tl.minimum(first + step, last - 1)
        places = words + chunk * (FIXED.width * FIXED.span // 2) + rows * (FIXED.span // 2)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _inputs_at(x_rows, inside, k, FIXED: tl.constexpr, CHUNK: tl.constexpr):
    """``[SPAN, TOKENS]`` of inputs, zeros beyond the columns and for lanes without a token."""
    if FIXED.columns % CHUNK == 0:
        tile = tl.load(x_rows[None, :] + k[:, None], mask=inside[None, :], other=0.0)
    else:
        tile = tl.load(x_rows[None, :] + k[:, None], mask=inside[None, :] & (k < FIXED.columns)[:, None], other=0.0)
    return tile


@triton.jit
def coded_product(matrix, expert, rows, x_rows, inside, first, last, FIXED: tl.constexpr):
    """``[ROWS, TOKENS]`` float32: the weight rows ``rows`` times inputs, over the chunks from ``first`` to ``last``.

    Args:
        matrix: words, scales, zeros, row scales (``operands_of``).
        expert: which of several matrices, int64; 0 if there is one.
        rows: ``[ROWS]``, below ``width``.
        x_rows: ``[TOKENS]`` pointers to rows of inputs.
        inside: ``[TOKENS]``, whether a lane has a token.
    """
    words, scales, zeros, row_scale = matrix
    SPAN: tl.constexpr = FIXED.span
    SHIFTS: tl.constexpr = 16 // FIXED.bits
    CHUNK: tl.constexpr = SPAN * SHIFTS
    GROUP: tl.constexpr = FIXED.group if FIXED.group > 0 else (FIXED.columns + CHUNK - 1) // CHUNK * CHUNK
    SHARED: tl.constexpr = min(GROUP // SPAN, SHIFTS)  # spans of a chunk that have the same scale
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    ROWS: tl.constexpr = rows.shape[0]
    TOKENS: tl.constexpr = x_rows.shape[0]
    CHUNKS: tl.constexpr = (FIXED.columns + CHUNK - 1) // CHUNK
    GROUPS: tl.constexpr = (FIXED.columns + GROUP - 1) // GROUP
    words += expert * (CHUNKS * FIXED.width * SPAN // 2)
    base = expert * (GROUPS * FIXED.width)
    places = rows[:, None] * (SPAN // 2) + tl.arange(0, SPAN // 2)[None, :]
    # Products of float32 keep both operands in shared memory, which has no room for a group.
    SPANS: tl.constexpr = SHARED if DTYPE.primitive_bitwidth == 16 else 1
    inner = tl.arange(0, SPANS * SPAN)
    acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    shared = shared_at(scales, zeros, base, first, rows, FIXED)
    for chunk in tl.range(first, last, num_stages=FIXED.stages):
        tile = tl.load(words + chunk * (FIXED.width * SPAN // 2) + places)
        following = shared_at(
            scales, zeros, base, chunk + 1, rows, FIXED
        )  # the pipeline fetches operands of products alone
        for begin in tl.static_range(0, SHIFTS, SPANS):
            scale, zero = shared[begin // SHARED], shared[4 + begin // SHARED]
            inputs = _inputs_at(x_rows, inside, chunk * CHUNK + begin * SPAN + inner, FIXED, CHUNK)
            numbers = numbers_of(tile, zero, begin, SPANS, FIXED, DTYPE)
            acc += tl.dot(numbers, inputs, input_precision=FIXED.precision) * scale[:, None]
        shared = following
    if row_scale is not None:
        acc *= tl.load(row_scale + expert * FIXED.width + rows)[:, None]
    return acc
