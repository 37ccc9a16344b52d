"""The decode step of Gated DeltaNet as one kernel.

Job: ``gdn_decode`` on the GPU, one launch. Owns: who reads and writes which convolution channels. Does not know: layers.

A program serves one row and one *key* head with all value heads of its group. It alone reads and shifts the convolution
states of that head's queries and keys and of those value heads, so the shift in place races with nobody, and it holds
whole value heads, so the output norm needs no second launch. The recurrent state is read once and written once: its
``[K, V]`` tile lies in float32 registers with V along the lanes, so that both products with it are sums down a thread.

Graph-safe: the grid is the padded number of rows; rows with slot 0 write zeros and leave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.gated_delta_rule import delta_rule_step, l2_normalize


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, accurate for very negative x too (W. Kahan's correction of log near 1)."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    exact = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _convolve(
    row, weight, bias, conv_state, slot, checkpoint, channels, mask,
    C: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """``silu(conv)`` of some channels, ``[len(channels)]`` float32; their states shift by one input."""
    o_w = tl.arange(0, BLOCK_W)
    tile_mask = mask[:, None]
    p_state = conv_state + (slot * C + channels[:, None]) * (W - 1) + o_w[None, :]
    window = tl.load(p_state, mask=tile_mask & (o_w < W - 1)[None, :], other=0.0).to(tl.float32)
    newest = tl.load(row + channels, mask=mask, other=0.0).to(tl.float32)
    window = tl.where((o_w == W - 1)[None, :], newest[:, None], window)
    taps = tl.load(weight + channels[:, None] * W + o_w[None, :], mask=tile_mask & (o_w < W)[None, :], other=0.0)
    y = tl.sum(window * taps.to(tl.float32), 1)
    if HAS_BIAS:
        y += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # a thread may store where another still has to load
    kept = tile_mask & ((o_w >= 1) & (o_w < W))[None, :]
    shifted = window.to(conv_state.dtype.element_ty)
    tl.store(p_state - 1, shifted, mask=kept)
    if HAS_CHECKPOINTS:
        p_checkpoint = conv_state + (checkpoint * C + channels[:, None]) * (W - 1) + o_w[None, :] - 1
        tl.store(p_checkpoint, shifted, mask=kept & (checkpoint >= 0))
    return y * tl.sigmoid(y)


@triton.jit
def _gdn_decode_kernel(
    projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state, state_slots, checkpoint_slots, out,
    stride_row, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """One row and key head."""
    i_key_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HV // HK
    KEY_DIM: tl.constexpr = HK * K
    VALUE_DIM: tl.constexpr = HV * V
    C: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_mask, v_mask = o_k < K, o_v < V
    slot = tl.load(state_slots + i_row).to(tl.int64)
    p_out = out + i_row * VALUE_DIM + i_key_head * GROUP * V + o_v
    if slot == 0:
        for i in tl.static_range(GROUP):
            tl.store(p_out + i * V, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=v_mask)
        return
    checkpoint = slot
    if HAS_CHECKPOINTS:
        checkpoint = tl.load(checkpoint_slots + i_row).to(tl.int64)

    inside = (i_key_head * GROUP) * K * V + o_k[:, None] * V + o_v[None, :]
    state_mask = k_mask[:, None] & v_mask[None, :]
    p_state = state + slot * HV * K * V + inside
    b_state = tl.load(p_state, mask=state_mask, other=0.0)  # under way while the convolution runs
    row = projected + i_row * stride_row
    b_q = _convolve(
        row, conv_weight, conv_bias, conv_state, slot, checkpoint, i_key_head * K + o_k, k_mask,
        C, W, BLOCK_W, HAS_BIAS, HAS_CHECKPOINTS,
    )  # fmt: skip
    b_k = _convolve(
        row, conv_weight, conv_bias, conv_state, slot, checkpoint, KEY_DIM + i_key_head * K + o_k, k_mask,
        C, W, BLOCK_W, HAS_BIAS, HAS_CHECKPOINTS,
    )  # fmt: skip
    b_q, b_k = l2_normalize(b_q) * (K**-0.5), l2_normalize(b_k)
    b_weight = tl.load(norm_weight + o_v, mask=v_mask, other=0.0).to(tl.float32)
    for i in tl.static_range(GROUP):
        head = i_key_head * GROUP + i
        if i > 0:
            b_state = tl.load(p_state + i * K * V, mask=state_mask, other=0.0)
        gates = row + C + VALUE_DIM + head
        beta = tl.sigmoid(tl.load(gates).to(tl.float32))
        a = tl.load(gates + HV).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * _softplus(a))
        gate = tl.load(row + C + head * V + o_v, mask=v_mask, other=0.0).to(tl.float32)
        b_v = _convolve(
            row, conv_weight, conv_bias, conv_state, slot, checkpoint, 2 * KEY_DIM + head * V + o_v, v_mask,
            C, W, BLOCK_W, HAS_BIAS, HAS_CHECKPOINTS,
        )  # fmt: skip
        b_out, new_state = delta_rule_step(b_state.to(tl.float32), b_q, b_k, b_v, decay, beta)
        stored = new_state.to(state.dtype.element_ty)
        tl.store(p_state + i * K * V, stored, mask=state_mask)
        if HAS_CHECKPOINTS:
            p_checkpoint = state + checkpoint * HV * K * V + inside + i * K * V
            tl.store(p_checkpoint, stored, mask=state_mask & (checkpoint >= 0))
        b_out *= tl.rsqrt(tl.sum(b_out * b_out, 0) / V + eps) * b_weight * gate * tl.sigmoid(gate)
        tl.store(p_out + i * V, b_out.to(out.dtype.element_ty), mask=v_mask)


def gdn_decode_triton(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    checkpoint_slots: Tensor | None = None,
    out: Tensor | None = None,
    num_warps: int = 4,
) -> Tensor:
    """Triton kernel of ``gdn_decode``; all arithmetic in float32, rounded at the stores only."""
    num_rows, kernel = projected.shape[0], conv_weight.shape[1]
    assert projected.stride(1) == 1 and conv_weight.is_contiguous(), "projected rows and conv_weight must be dense"
    assert conv_state.is_contiguous() and state.is_contiguous() and state_slots.is_contiguous()
    out = torch.empty(num_rows, num_v_heads * head_v_dim, dtype=projected.dtype, device=projected.device) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        _gdn_decode_kernel[(num_k_heads, num_rows)](
            projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state, state_slots,
            checkpoint_slots, out, projected.stride(0), eps,
            HK=num_k_heads, HV=num_v_heads, K=head_k_dim, V=head_v_dim, W=kernel,
            BLOCK_K=triton.next_power_of_2(head_k_dim), BLOCK_V=triton.next_power_of_2(head_v_dim),
            BLOCK_W=triton.next_power_of_2(kernel),
            HAS_BIAS=conv_bias is not None, HAS_CHECKPOINTS=checkpoint_slots is not None,
            num_warps=num_warps,
        )  # fmt: skip
    return out
