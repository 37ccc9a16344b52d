"""The kernel of ``bounded_attention``: some patches of one head over the keys that any of them sees, softmax online."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision

_HIDDEN = tl.constexpr(-1e30)
"""Score of a key that a patch does not see; finite, so that a patch that sees none stays finite."""


@jit(do_not_specialize=["num_patches", "stride_bounds"], do_not_specialize_on_alignment=["bounds"])
def _bounded_attention_kernel(
    qkv, bounds, out, num_patches, stride_bounds, scale_log2,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PATCHES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    column = tl.arange(0, BLOCK_DIM)
    inside = (column < HEAD_DIM)[None, :]
    valid = patch < num_patches
    low = tl.load(bounds + patch * stride_bounds, mask=valid, other=num_patches)
    high = tl.load(bounds + patch * stride_bounds + 1, mask=valid, other=0)
    p_head = qkv + tl.program_id(1) * HEAD_DIM + column[None, :]
    row = 3 * HEADS * HEAD_DIM
    q = tl.load(p_head + patch.to(tl.int64)[:, None] * row, mask=valid[:, None] & inside, other=0.0)
    acc = tl.zeros([PATCHES, BLOCK_DIM], dtype=tl.float32)
    row_sum = tl.zeros([PATCHES], dtype=tl.float32)
    row_max = tl.full([PATCHES], _HIDDEN, dtype=tl.float32)
    for start in tl.range(tl.min(low), tl.max(high), KEYS):
        key = start + tl.arange(0, KEYS)
        mask = (key < num_patches)[:, None] & inside
        p_key = p_head + key.to(tl.int64)[:, None] * row + HEADS * HEAD_DIM
        k = tl.load(p_key, mask=mask, other=0.0)
        v = tl.load(p_key + HEADS * HEAD_DIM, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(visible, scores, _HIDDEN)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shrink = tl.exp2(row_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    p_out = out + patch.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + tl.program_id(1) * HEAD_DIM + column[None, :]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=valid[:, None] & inside)


def bounded_attention_triton(qkv: Tensor, bounds: Tensor) -> Tensor:
    """As ``weft.ops.vision_attention.bounded_attention``."""
    num_patches, _, heads, head_dim = qkv.shape
    assert qkv.is_contiguous() and bounds.stride(1) == 1 and bounds.dtype == torch.int32
    out = torch.empty(num_patches, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    exact = qkv.dtype == torch.float32
    patches = 32 if exact else 64
    _bounded_attention_kernel[(cdiv(num_patches, patches), heads)](
        qkv, bounds, out, num_patches, bounds.stride(0), LOG2_E.value * head_dim**-0.5,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_DIM=max(16, next_power_of_2(head_dim)), PATCHES=patches,
        KEYS=32 if exact else 64, PRECISION=precision(qkv), num_warps=4, num_stages=3,
        **early_launch(qkv.device),
    )  # fmt: skip
    return out
