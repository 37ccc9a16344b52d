"""The decode step of Kimi Delta Attention: the convolution in one launch, everything after it in another.

Job: ``kda_decode`` on the GPU. Owns: nothing. Does not know: layers.

A program serves one row and one head. The recurrent state is read once and written once, and passes through float32
registers with V along the lanes.

Graph-safe: the grid is the padded number of rows; rows with slot 0 write zeros, or nothing, and leave.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.config.kimi import KimiDeltaConfig
from weft.ops.triton.conv_update import causal_conv1d_update_triton
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import sigmoid, softplus
from weft.ops.triton.gated_delta_rule import delta_rule_step, l2_normalize
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@jit(do_not_specialize_on_alignment=["state_slots"])
def _kda_decode_kernel(
    qkv, b, f, gate, A_log, dt_bias, norm_weight, state, state_slots, out, eps, stride_b, stride_f, stride_gate,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and head."""
    enter(EARLY)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_v = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    k_mask, v_mask = o_k < K, o_v < K
    columns = head * K + o_k
    p_out = out + row * H * K + head * K + o_v
    slot = tl.load(state_slots + row).to(tl.int64)
    if slot == 0:
        if not KEEP:
            tl.store(p_out, tl.zeros([BLOCK], out.dtype.element_ty), mask=v_mask)
        return
    p_state = state + (slot * H + head) * K * K + o_k[:, None] * K + o_v[None, :]
    mask = k_mask[:, None] & v_mask[None, :]
    b_state = tl.load(p_state, mask=mask, other=0.0).to(tl.float32)
    p_row = qkv + row * 3 * H * K
    b_q = l2_normalize(tl.load(p_row + columns, mask=k_mask, other=0.0).to(tl.float32)) * (K**-0.5)
    b_k = l2_normalize(tl.load(p_row + H * K + columns, mask=k_mask, other=0.0).to(tl.float32))
    b_v = tl.load(p_row + 2 * H * K + head * K + o_v, mask=v_mask, other=0.0).to(tl.float32)
    x = tl.load(f + row * stride_f + columns, mask=k_mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + columns, mask=k_mask, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x))
    beta = sigmoid(tl.load(b + row * stride_b + head).to(tl.float32))
    b_out, new_state = delta_rule_step(b_state, b_q, b_k, b_v, decay[:, None], beta)
    tl.store(p_state, new_state.to(state.dtype.element_ty), mask=mask)
    b_out *= tl.rsqrt(tl.sum(b_out * b_out, 0) / K + eps)
    b_out *= tl.load(norm_weight + o_v, mask=v_mask, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + row * stride_gate + head * K + o_v, mask=v_mask, other=0.0).to(tl.float32)
    tl.store(p_out, (b_out * sigmoid(b_gate)).to(out.dtype.element_ty), mask=v_mask)


def kda_decode_triton(
    projected: Tensor,
    f: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: KimiDeltaConfig,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``kda_decode`` of ``weft/ops/kda.py``."""
    heads, dim, width = geometry.num_heads, geometry.head_dim, geometry.width
    assert projected.stride(1) == f.stride(1) == gate.stride(1) == 1 and state.is_contiguous()
    assert out is None or out.is_contiguous()
    keep, out = out is not None, projected.new_empty(projected.shape[0], width) if out is None else out
    if projected.shape[0]:
        qkv = causal_conv1d_update_triton(projected[:, : 3 * width], conv_weight, conv_state, state_slots)
        b, block = projected[:, 3 * width :], next_power_of_2(dim)
        _kda_decode_kernel[(heads, projected.shape[0])](
            qkv, b, f, gate, A_log, dt_bias, norm_weight, state, state_slots, out, eps,
            b.stride(0), f.stride(0), gate.stride(0),
            H=heads, K=dim, BLOCK=block, KEEP=keep, num_warps=8 if block >= 128 else 4,
            **early_launch(projected.device),
        )  # fmt: skip
    return out
