"""Coded weights written out in two bytes, for the matrix library.

With many rows of inputs a product is bound by arithmetic, and widening its weights takes a small part of the time. A
part of the rows is widened at a time, so that the memory is bounded and most of it stays in the L2 cache.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.codes import CodedMatrix
from weft.ops.codes.product import Fixed, fixed_of, numbers_of, operands_of, shared_at
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv

_PART_BYTES = 32 << 20
"""Bytes that are widened at a time."""
_ROWS = 64


@jit
def _widen_kernel(
    words, scales, zeros, row_scale, out, first_row, FIXED: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr
):
    """Write ``CHUNKS`` chunks of some rows."""
    enter(EARLY)
    SPAN: tl.constexpr = FIXED.span
    SHIFTS: tl.constexpr = 16 // FIXED.bits
    GROUP: tl.constexpr = FIXED.group if FIXED.group > 0 else FIXED.columns
    rows = first_row + tl.program_id(0) * FIXED.rows + tl.arange(0, FIXED.rows)
    in_width = rows < FIXED.width
    rows = tl.minimum(rows, FIXED.width - 1)
    places = rows[:, None] * (SPAN // 2) + tl.arange(0, SPAN // 2)[None, :]
    targets = out + (rows - first_row).to(tl.int64)[:, None] * FIXED.columns + tl.arange(0, SPAN)[None, :]
    factor = tl.full([FIXED.rows], 1.0, dtype=tl.float32)
    if row_scale is not None:
        factor = tl.load(row_scale + rows)
    for step in tl.static_range(CHUNKS):
        chunk = tl.program_id(1) * CHUNKS + step
        if chunk * (SPAN * SHIFTS) < FIXED.columns:
            tile = tl.load(words + chunk * (FIXED.width * SPAN // 2) + places)
            shared = shared_at(scales, zeros, 0, chunk, rows, FIXED)
            for shift in tl.static_range(SHIFTS):
                begin = chunk * (SPAN * SHIFTS) + shift * SPAN
                scale, zero = shared[shift * SPAN // GROUP], shared[4 + shift * SPAN // GROUP]
                numbers = numbers_of(tile, zero, shift, 1, FIXED, out.dtype.element_ty)
                weights = numbers.to(tl.float32) * (scale * factor)[:, None]
                mask = in_width[:, None] & (begin + tl.arange(0, SPAN) < FIXED.columns)[None, :]
                tl.store(targets + begin, weights.to(out.dtype.element_ty), mask=mask)


def widened_parts(matrix: CodedMatrix, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the matrix and their weights ``[n, K]`` in x's dtype, part by part. Each part is overwritten by the next
    one."""
    width = matrix.words.shape[-2]
    count = min(width, max(_ROWS, _PART_BYTES // (matrix.columns * x.element_size()) // _ROWS * _ROWS))
    buffer = torch.empty((count, matrix.columns), dtype=x.dtype, device=x.device)
    fixed = fixed_of(matrix, x, rows=_ROWS, tokens=16, stages=1)
    for first in range(0, width, count):
        rows = slice(first, min(first + count, width))
        _launch(matrix, buffer, first, rows.stop - first, fixed)
        yield rows, buffer[: rows.stop - first]


def _launch(matrix: CodedMatrix, out: Tensor, first: int, count: int, fixed: Fixed) -> None:
    chunks = 2
    _widen_kernel[(cdiv(count, _ROWS), cdiv(matrix.words.shape[-3], chunks))](
        *operands_of(matrix), out, first, FIXED=fixed, CHUNKS=chunks, num_warps=4, **early_launch(out.device)
    )
