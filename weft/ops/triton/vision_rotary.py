"""The kernel of ``rotate_patches``: one program turns all queries and keys of one patch, in place."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@jit
def _rotate_kernel(
    qkv, cos_sin, stride_patch,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_HALF)
    half = HEAD_DIM // 2
    inside = column < half
    cos = tl.load(cos_sin + patch * HEAD_DIM + column, mask=inside, other=0.0)[None, :]
    sin = tl.load(cos_sin + patch * HEAD_DIM + half + column, mask=inside, other=0.0)[None, :]
    mask = (row < ROWS)[:, None] & inside[None, :]
    place = qkv + patch * stride_patch + row[:, None] * HEAD_DIM + column[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(place + half, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=mask)


def rotate_patches_triton(qkv: Tensor, cos_sin: Tensor) -> Tensor:
    """As ``weft.ops.vision_attention.rotate_patches``."""
    num_patches, _, heads, head_dim = qkv.shape
    assert qkv.is_contiguous() and cos_sin.is_contiguous() and cos_sin.shape == (num_patches, head_dim)
    rows = 2 * heads  # queries and keys stand one after the other
    _rotate_kernel[(num_patches,)](
        qkv, cos_sin, qkv.stride(0), ROWS=rows, HEAD_DIM=head_dim,
        BLOCK_ROWS=next_power_of_2(rows), BLOCK_HALF=next_power_of_2(head_dim // 2), num_warps=4,
        **early_launch(qkv.device),
    )  # fmt: skip
    return qkv
