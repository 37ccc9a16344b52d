"""RMSNorms over three neighbouring parts of a row as one kernel: a program has one row's part."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@triton.jit
def _norm_part(x, weight, out, i_row, stride_x, eps, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row's columns from ``FIRST`` on."""
    inside = tl.arange(0, BLOCK)
    mask = inside < SIZE
    y = tl.load(x + i_row * stride_x + FIRST + inside, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + FIRST + inside, mask=mask, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps) * scale
    tl.store(out + i_row * SIZE + inside, y.to(out.dtype.element_ty), mask=mask)


@jit
def _split_norm_kernel(
    x, weight, first, second, third, stride_x, eps,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row's part."""
    enter(EARLY)
    i_part, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if i_part == 0:
        _norm_part(x, weight, first, i_row, stride_x, eps, 0, A, BLOCK_A)
    elif i_part == 1:
        _norm_part(x, weight, second, i_row, stride_x, eps, A, B, BLOCK_B)
    else:
        _norm_part(x, weight, third, i_row, stride_x, eps, A + B, C, BLOCK_C)


def split_rms_norm_triton(x: Tensor, weight: Tensor, eps: float, sizes: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Triton kernel of ``split_rms_norm``."""
    assert x.stride(1) == 1 and weight.is_contiguous() and x.shape[1] == sum(sizes)
    outs = tuple(x.new_empty(x.shape[0], size) for size in sizes)
    if x.shape[0]:
        a, b, c = sizes
        _split_norm_kernel[(3, x.shape[0])](
            x, weight, *outs, x.stride(0), eps,
            A=a, B=b, C=c, BLOCK_A=next_power_of_2(a), BLOCK_B=next_power_of_2(b), BLOCK_C=next_power_of_2(c),
            num_warps=1, **early_launch(x.device),
        )  # fmt: skip
    return outs
