"""Head norms, rotary embedding and the KV store in one launch.

Job: ``qk_norm_rope`` on the GPU. Owns: nothing. Does not know: the projection, or attention.

A program takes a few heads of one token: query heads go to the output, key heads to their page, and the program of a
key head stores the value head beside it. Arithmetic is float32 from the projection's output to the one rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.qkv_split import split_qkv


@triton.jit
def _normed(
    row, heads, dims, in_heads, weight, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    partner,
):  # fmt: skip
    """Some heads of a token, and for each dimension the one it is rotated with; both normalised."""
    mask = in_heads[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(row + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(row + heads[:, None] * HEAD_DIM + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x_scale = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        y_scale = tl.load(weight + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            x_scale += 1.0
            y_scale += 1.0
        x = x * inverse * x_scale[None, :]
        y = y * inverse * y_scale[None, :]
    return x, y


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _qk_norm_rope_kernel(
    q, k, v, q_norm, k_norm, cos_sin, positions, slot_mapping, q_out, k_cache, v_cache, eps, stride_qkv,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, HEADS: tl.constexpr, Q_PROGRAMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, BLOCK_D)
    rotated = dims < ROTARY_DIM
    partner = tl.where(rotated, tl.where(dims < HALF, dims + HALF, dims - HALF), dims)
    angle = cos_sin + tl.load(positions + token) * ROTARY_DIM + dims % HALF
    cos = tl.load(angle, mask=rotated, other=1.0)
    sin = tl.load(angle + HALF, mask=rotated, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    if program < Q_PROGRAMS:
        heads = program * HEADS + tl.arange(0, HEADS)
        in_heads = heads < NUM_HEADS
        x, y = _normed(
            q + token * stride_qkv, heads, dims, in_heads, q_norm, eps, HEAD_DIM, NORM, ZERO_CENTERED, partner
        )
        x = x * cos[None, :] + y * sin[None, :]
        mask = in_heads[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(q_out + offsets, x.to(q_out.dtype.element_ty), mask=mask)
    else:
        heads = (program - Q_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        in_heads = heads < NUM_KV_HEADS
        x, y = _normed(
            k + token * stride_qkv, heads, dims, in_heads, k_norm, eps, HEAD_DIM, NORM, ZERO_CENTERED, partner
        )
        x = x * cos[None, :] + y * sin[None, :]
        mask = in_heads[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (tl.load(slot_mapping + token) * NUM_KV_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(k_cache + offsets, x.to(k_cache.dtype.element_ty), mask=mask)
        values = tl.load(v + token * stride_qkv + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        tl.store(v_cache + offsets, values.to(v_cache.dtype.element_ty), mask=mask)


def qk_norm_rope_triton(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    zero_centered: bool,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    gated: bool,
) -> tuple[Tensor, Tensor | None]:
    """``qk_norm_rope`` of ``weft/ops/qk_norm_rope.py``."""
    assert (q_norm is None) == (k_norm is None) and qkv.stride(1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and cos_sin.is_contiguous()
    q, k, v, gate = split_qkv(qkv, num_heads, num_kv_heads, head_dim, gated)
    q_out = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_d = triton.next_power_of_2(head_dim)
    heads = max(1, 512 // block_d)
    q_programs = triton.cdiv(num_heads, heads)
    _qk_norm_rope_kernel[(q_programs + triton.cdiv(num_kv_heads, heads), qkv.shape[0])](
        q, k, v, q if q_norm is None else q_norm, q if k_norm is None else k_norm,
        cos_sin, positions, slot_mapping, q_out, k_cache, v_cache, eps, qkv.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=cos_sin.shape[1],
        NORM=q_norm is not None, ZERO_CENTERED=zero_centered, HEADS=heads, Q_PROGRAMS=q_programs,
        BLOCK_D=block_d, num_warps=2,
    )  # fmt: skip
    return q_out, gate
