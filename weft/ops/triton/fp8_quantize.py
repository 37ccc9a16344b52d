"""Inputs of FP8 products: e4m3 values and their scales, in one pass over each row.

Job: ``quantize_inputs`` on the GPU. Owns: the device functions that other kernels quantise with. Does not know: what is
multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.e4m3 import E4M3, E4M3_MAX, SMALLEST_AMAX
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_COLUMNS = 1024
"""Columns per program, where groups have scales of their own."""


@triton.jit
def scale_of(amax):
    """The scale of values whose largest magnitude is ``amax``."""
    return tl.maximum(amax, _SMALLEST) / _MAX


@triton.jit
def to_e4m3(values, scale):
    """``values / scale`` rounded to e4m3; what is too large saturates."""
    return tl.minimum(tl.maximum(values / scale, -_MAX), _MAX).to(tl.float8e4nv)


@jit(do_not_specialize=["stride_group"])
def _quantize_kernel(
    x, input_scale, values, scales, stride_x, stride_group,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STATIC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one row; all of them where the row has one scale."""
    enter(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    wide = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        tl.store(values + row * WIDTH + columns, to_e4m3(wide, tl.load(input_scale)), mask=inside)
    elif BLOCK:
        groups = tl.reshape(wide, [COLUMNS // BLOCK, BLOCK])
        scale = scale_of(tl.max(tl.abs(groups), 1))
        quantized = tl.reshape(to_e4m3(groups, scale[:, None]), [COLUMNS])
        tl.store(values + row * WIDTH + columns, quantized, mask=inside)
        group = tl.program_id(0) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
        tl.store(scales + group.to(tl.int64) * stride_group + row, scale, mask=group * BLOCK < WIDTH)
    else:
        scale = scale_of(tl.max(tl.abs(wide), 0))
        tl.store(values + row * WIDTH + columns, to_e4m3(wide, scale), mask=inside)
        tl.store(scales + row, scale)


def padded_rows(num_rows: int) -> int:
    """So many rows the matrix library asks for: a multiple of four."""
    return -(-num_rows // 4) * 4


def quantize_inputs_triton(x: Tensor, input_scale: Tensor | None, *, block: int) -> tuple[Tensor, Tensor]:
    """``quantize_inputs_reference`` of ``weft/ops/fp8.py`` for ``x [T, K]``.

    Returns:
        Contiguous values ``[T, K]``, and scales: ``[T, G]``, the T of each group side by side, or ``[T, 1]``; or the
        static scale. With scales of groups, both have ``padded_rows(T)`` rows in memory, as the matrix library wants;
        nothing is written beyond T.
    """
    num_rows, width = x.shape
    assert x.stride(1) == 1
    height = padded_rows(num_rows) if block else num_rows
    values = torch.empty((height, width), dtype=E4M3, device=x.device)[:num_rows]
    static = input_scale is not None
    scales = input_scale
    if scales is None:
        groups = cdiv(width, block) if block else 1
        scales = torch.empty((groups, height), dtype=torch.float32, device=x.device).t()[:num_rows]
    columns = min(_COLUMNS, next_power_of_2(width)) if block or static else next_power_of_2(width)
    columns = max(columns, block)
    if num_rows:
        _quantize_kernel[(cdiv(width, columns), num_rows)](
            x, x if input_scale is None else input_scale, values, scales, x.stride(0), scales.stride(-1),
            WIDTH=width, BLOCK=block, COLUMNS=columns, STATIC=static,
            num_warps=max(1, min(8, columns // 256)), **early_launch(x.device),
        )  # fmt: skip
    return values, scales
