"""The kernel of ``add_layer_norm``: a program has one row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@jit
def _add_layer_norm_kernel(
    x, y, weight, bias, total, out, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    both = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / SIZE
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (centred * scale * w + b).to(out.dtype.element_ty), mask=inside)


def add_layer_norm_triton(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``weft.ops.layer_norm.add_layer_norm``."""
    rows, size = x.shape
    assert x.is_contiguous() and y.is_contiguous() and x.shape == y.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(size)
    _add_layer_norm_kernel[(rows,)](
        x, y, weight, bias, total, out, eps, SIZE=size, BLOCK=block, num_warps=4 if block <= 2048 else 8,
        **early_launch(x.device),
    )  # fmt: skip
    return total, out
