"""``rms_norm`` on the GPU: plain or zero-centred, after the sum of parts and the residual; a program per row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.few_rows import add_parts
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@jit
def _rms_norm_kernel(
    x, residual, weight, y, total, eps, stride_x, stride_part, stride_residual,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)
    values = add_parts(x + row * stride_x + columns, mask, stride_part, PARTS).to(y.dtype.element_ty)
    if RESIDUAL:
        values = values + tl.load(residual + row * stride_residual + columns, mask=mask, other=0.0)
        tl.store(total + row * WIDTH + columns, values, mask=mask)
    values = values.to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    tl.store(y + row * WIDTH + columns, (values * inverse * scale).to(y.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``rms_norm`` of ``weft/ops/norm.py``."""
    width, like = x.shape[-1], x if residual is None else residual
    parts = len(x) if x.dim() > like.dim() else 1
    rows, other = x.reshape(-1, width), like.reshape(-1, width)
    assert rows.stride(1) == other.stride(1) == 1
    y = torch.empty(like.shape, dtype=like.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    block, count = next_power_of_2(width), rows.shape[0] // parts
    part = count * rows.stride(0) if parts > 1 else 0
    _rms_norm_kernel[(count,)](
        rows, other, weight, y, total, eps, rows.stride(0), part, other.stride(0),
        WIDTH=width, PARTS=parts, ZERO_CENTERED=zero_centered, RESIDUAL=residual is not None, BLOCK=block,
        num_warps=max(1, min(8, block // (256 if parts == 1 else 128))), **early_launch(x.device),
    )  # fmt: skip
    return y if residual is None else (y, total)
