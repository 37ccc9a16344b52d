"""Inputs of FP8 products: e4m3 values and their scales, in one pass over each row.

Job: ``quantize_inputs_triton``, and the device functions by which other kernels quantise their inputs. Does not know:
what is multiplied.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.fp8 import E4M3, E4M3_MAX, SMALLEST_AMAX
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_COLUMNS = 1024
"""Columns per program, where groups have scales of their own."""
_MANY_ROWS = 512
"""Most rows with one row per program. With more rows a program takes several: enough loads are in flight, and
neighbouring scales share a store."""


@triton.jit
def scale_of(amax):
    """The scale of values whose largest magnitude is ``amax``."""
    return tl.maximum(amax, _SMALLEST) / _MAX


@triton.jit
def to_e4m3(values, scale):
    """``values / scale`` rounded to e4m3; what is too large saturates."""
    return tl.minimum(tl.maximum(values / scale, -_MAX), _MAX).to(tl.float8e4nv)


class Fixed(NamedTuple):
    """Compile-time parameters of a pass.

    Attributes:
        width: of a row; 0: there is no pass.
        block: columns that share a scale, 0: all of a row.
        rows, columns: of a tile; all columns where a row has one scale.
        static: all rows have one scale, which is given.
    """

    width: int
    block: int
    rows: int
    columns: int
    static: bool


@triton.jit
def quantize_tile(inputs, column_tile, row_tile, FIXED: tl.constexpr):
    """Some columns of some rows."""
    x, input_scale, values, scales, num_rows, stride_x, stride_group = inputs
    WIDTH: tl.constexpr = FIXED.width
    BLOCK: tl.constexpr = FIXED.block
    ROWS: tl.constexpr = FIXED.rows
    COLUMNS: tl.constexpr = FIXED.columns
    rows = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    wide = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    stored = values + rows[:, None] * WIDTH + columns[None, :]
    if FIXED.static:
        tl.store(stored, to_e4m3(wide, tl.load(input_scale)), mask=inside)
    elif BLOCK:
        groups = tl.reshape(wide, [ROWS, COLUMNS // BLOCK, BLOCK])
        scale = scale_of(tl.max(tl.abs(groups), 2))
        tl.store(stored, tl.reshape(to_e4m3(groups, scale[:, :, None]), [ROWS, COLUMNS]), mask=inside)
        group = column_tile * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
        mask = (rows < num_rows)[:, None] & (group * BLOCK < WIDTH)[None, :]
        tl.store(scales + group.to(tl.int64)[None, :] * stride_group + rows[:, None], scale, mask=mask)
    else:
        scale = scale_of(tl.max(tl.abs(wide), 1))
        tl.store(stored, to_e4m3(wide, scale[:, None]), mask=inside)
        tl.store(scales + rows, scale, mask=rows < num_rows)


@triton.jit
def quantize_nth_tile(inputs, tile, FIXED: tl.constexpr):
    """The same, for kernels that do something else besides."""
    COLUMNS: tl.constexpr = FIXED.columns
    ACROSS: tl.constexpr = (FIXED.width + COLUMNS - 1) // COLUMNS
    quantize_tile(inputs, tile % ACROSS, tile // ACROSS, FIXED)


@jit(do_not_specialize=["num_rows", "stride_group"])
def _quantize_kernel(
    x, input_scale, values, scales, num_rows, stride_x, stride_group, FIXED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    enter(EARLY)
    inputs = (x, input_scale, values, scales, num_rows, stride_x, stride_group)
    quantize_tile(inputs, tl.program_id(0), tl.program_id(1), FIXED)


def padded_rows(num_rows: int) -> int:
    """Round up to a multiple of four rows, as the matrix library requires."""
    return -(-num_rows // 4) * 4


class Pass(NamedTuple):
    """One pass over inputs, to be launched.

    Attributes:
        outputs: values and scales, as of ``quantize_inputs_triton``.
        args, fixed: of ``quantize_tile``.
        tiles: how many there are in a row, and in a column.
    """

    outputs: tuple[Tensor, Tensor]
    args: tuple[Tensor | int, ...]
    fixed: Fixed
    tiles: tuple[int, int]

    @property
    def programs(self) -> int:
        return self.tiles[0] * self.tiles[1]


def no_pass(like: Tensor) -> Pass:
    """Nothing to quantise; ``like`` stands in for tensors."""
    return Pass((like, like), (like, like, like, like, 0, 0, 0), Fixed(0, 0, 1, 1, False), (0, 0))


def prepare_pass(x: Tensor, input_scale: Tensor | None, *, block: int) -> Pass:
    """Allocate the outputs for ``x [T, K]``, T at least 1, and choose tiles."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    height = padded_rows(num_rows) if block else num_rows
    values = torch.empty((height, width), dtype=E4M3, device=x.device)[:num_rows]
    scales = input_scale
    if scales is None:
        groups = cdiv(width, block) if block else 1
        scales = torch.empty((groups, height), dtype=torch.float32, device=x.device).t()[:num_rows]
    columns = min(_COLUMNS, next_power_of_2(width)) if block or input_scale is not None else next_power_of_2(width)
    columns = max(columns, block)
    rows = 4 if num_rows > _MANY_ROWS and columns <= _COLUMNS else 1
    fixed = Fixed(width, block, rows, columns, input_scale is not None)
    args = (x, x if input_scale is None else input_scale, values, scales, num_rows, x.stride(0), scales.stride(-1))
    return Pass((values, scales), args, fixed, (cdiv(width, columns), cdiv(num_rows, rows)))


def quantize_inputs_triton(x: Tensor, input_scale: Tensor | None, *, block: int) -> tuple[Tensor, Tensor]:
    """``quantize_inputs_reference`` of ``weft/ops/linear`` for ``x [T, K]``.

    Returns:
        Contiguous values ``[T, K]``, and scales: ``[T, G]``, the T of each group side by side, or ``[T, 1]``; or the
        static scale. With scales of groups, both have ``padded_rows(T)`` rows in memory, as the matrix library wants;
        nothing is written beyond T.
    """
    work = prepare_pass(x, input_scale, block=block)
    if x.shape[0]:
        _quantize_kernel[work.tiles](
            *work.args, FIXED=work.fixed, num_warps=max(1, min(8, work.fixed.columns // 256)), **early_launch(x.device)
        )
    return work.outputs
