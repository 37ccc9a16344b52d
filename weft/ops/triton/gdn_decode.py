"""The decode step of Gated DeltaNet as one kernel.

Job: ``gdn_decode`` on the GPU, one launch. Owns: who reads and writes which convolution channels. Does not know:
layers.

A program serves one row and one *key* head with all value heads of its group. It alone reads and shifts the convolution
states of that head's queries and keys and of those value heads, so the shift in place races with nobody, and it holds
whole value heads, so the output norm needs no second launch. The recurrent state is read once and written once: its
tiles, ``[K, BLOCK_V]``, pass through float32 registers with V along the lanes, the next one loading meanwhile.

The convolved and normalised vectors go through a small float32 buffer (it stays in the L1 cache): read back, they have
the layout that the state's tile asks for, where recomputing them in that layout would repeat every load in every warp.

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
    row, weight, bias, p_state, channels, mask, W: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """``silu(conv)`` of some channels, ``[len(channels)]`` float32. ``p_state``: the row's ``[C, W - 1]`` states."""
    y = tl.load(row + channels, mask=mask, other=0.0).to(tl.float32)
    y *= tl.load(weight + channels * W + (W - 1), mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        tap = tl.load(weight + channels * W + j, mask=mask, other=0.0).to(tl.float32)
        y += tap * tl.load(p_state + channels * (W - 1) + j, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _shift(
    row, p_state, p_checkpoint, checkpoint, channels, mask, W: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr
):  # fmt: skip
    """Move some channels' states by one input, in place, and copy them to the checkpoint's slot."""
    for j in tl.static_range(W - 1):
        if j < W - 2:
            x = tl.load(p_state + channels * (W - 1) + j + 1, mask=mask)
        else:
            x = tl.load(row + channels, mask=mask).to(p_state.dtype.element_ty)
        tl.debug_barrier()  # every thread has loaded what another one overwrites
        tl.store(p_state + channels * (W - 1) + j, x, mask=mask)
        if HAS_CHECKPOINTS:
            tl.store(p_checkpoint + channels * (W - 1) + j, x, mask=mask & (checkpoint >= 0))


@triton.jit(do_not_specialize_on_alignment=["state_slots", "checkpoint_slots"])
def _gdn_decode_kernel(
    projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state, state_slots, checkpoint_slots,
    mixed, out, stride_row, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """One row and key head."""
    i_key_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HV // HK
    KEY_DIM: tl.constexpr = HK * K
    VALUE_DIM: tl.constexpr = HV * V
    C: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_mask = o_k < K
    slot = tl.load(state_slots + i_row).to(tl.int64)
    p_out = out + i_row * VALUE_DIM + i_key_head * GROUP * V + o_v
    if slot == 0:
        for i in tl.static_range(GROUP):
            for j in tl.static_range(TILES):
                zeros = tl.zeros([BLOCK_V], out.dtype.element_ty)
                tl.store(p_out + i * V + j * BLOCK_V, zeros, mask=j * BLOCK_V + o_v < V)
        return
    checkpoint = slot
    if HAS_CHECKPOINTS:
        checkpoint = tl.load(checkpoint_slots + i_row).to(tl.int64)

    inside = (i_key_head * GROUP) * K * V + o_k[:, None] * V + o_v[None, :]
    p_state = state + slot * HV * K * V + inside
    b_next = tl.load(p_state, mask=k_mask[:, None] & (o_v < V)[None, :], other=0.0)  # under way during the convolution
    row = projected + i_row * stride_row
    p_conv = conv_state + slot * C * (W - 1)
    o_g = tl.arange(0, BLOCK_G)
    g_mask = o_g < GROUP * V
    q_channels = i_key_head * K + o_k
    k_channels = KEY_DIM + q_channels
    v_channels = 2 * KEY_DIM + i_key_head * GROUP * V + o_g
    p_mixed = mixed + i_row * C
    b_q = _convolve(row, conv_weight, conv_bias, p_conv, q_channels, k_mask, W, HAS_BIAS)
    b_k = _convolve(row, conv_weight, conv_bias, p_conv, k_channels, k_mask, W, HAS_BIAS)
    b_v = _convolve(row, conv_weight, conv_bias, p_conv, v_channels, g_mask, W, HAS_BIAS)
    tl.store(p_mixed + q_channels, l2_normalize(b_q) * (K**-0.5), mask=k_mask)
    tl.store(p_mixed + k_channels, l2_normalize(b_k), mask=k_mask)
    tl.store(p_mixed + v_channels, b_v, mask=g_mask)
    tl.debug_barrier()  # the vectors are written, and all convolution states read
    p_copy = conv_state + checkpoint * C * (W - 1)
    _shift(row, p_conv, p_copy, checkpoint, q_channels, k_mask, W, HAS_CHECKPOINTS)
    _shift(row, p_conv, p_copy, checkpoint, k_channels, k_mask, W, HAS_CHECKPOINTS)
    _shift(row, p_conv, p_copy, checkpoint, v_channels, g_mask, W, HAS_CHECKPOINTS)

    b_q = tl.load(p_mixed + q_channels, mask=k_mask, other=0.0)
    b_k = tl.load(p_mixed + k_channels, mask=k_mask, other=0.0)
    p_value = p_mixed + 2 * KEY_DIM + i_key_head * GROUP * V
    for i in tl.static_range(GROUP):
        head = i_key_head * GROUP + i
        p_gates = row + C + VALUE_DIM + head
        beta = tl.sigmoid(tl.load(p_gates).to(tl.float32))
        a = tl.load(p_gates + HV).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * _softplus(a))
        outputs = ()
        square_sum = 0.0
        for j in tl.static_range(TILES):
            columns = j * BLOCK_V + o_v
            v_mask = columns < V
            tile = i * K * V + j * BLOCK_V
            b_state = b_next
            if i * TILES + j + 1 < GROUP * TILES:
                ahead = (j + 1) % TILES * BLOCK_V
                mask = k_mask[:, None] & (ahead + o_v < V)[None, :]
                b_next = tl.load(p_state + (i + (j + 1) // TILES) * K * V + ahead, mask=mask, other=0.0)
            b_v = tl.load(p_value + i * V + columns, mask=v_mask, other=0.0)
            b_out, new_state = delta_rule_step(b_state.to(tl.float32), b_q, b_k, b_v, decay, beta)
            stored = new_state.to(state.dtype.element_ty)
            state_mask = k_mask[:, None] & v_mask[None, :]
            tl.store(p_state + tile, stored, mask=state_mask)
            if HAS_CHECKPOINTS:
                p_checkpoint = state + checkpoint * HV * K * V + inside + tile
                tl.store(p_checkpoint, stored, mask=state_mask & (checkpoint >= 0))
            square_sum += tl.sum(b_out * b_out, 0)
            outputs = outputs + (b_out,)  # noqa: RUF005 (no unpacking in kernels)
        scale = tl.rsqrt(square_sum / V + eps)
        for j in tl.static_range(TILES):
            columns = j * BLOCK_V + o_v
            v_mask = columns < V
            weight = tl.load(norm_weight + columns, mask=v_mask, other=0.0).to(tl.float32)
            gate = tl.load(row + C + head * V + columns, mask=v_mask, other=0.0).to(tl.float32)
            normed = outputs[j] * scale * weight * gate * tl.sigmoid(gate)
            tl.store(p_out + i * V + j * BLOCK_V, normed.to(out.dtype.element_ty), mask=v_mask)


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
    block_v: int = 64,
    num_warps: int = 4,
) -> Tensor:
    """Triton kernel of ``gdn_decode``; all arithmetic in float32, rounded at the stores only.

    ``block_v`` columns of the state are in flight while as many are worked on.
    """
    num_rows, kernel = projected.shape[0], conv_weight.shape[1]
    assert projected.stride(1) == 1 and conv_weight.is_contiguous(), "projected rows and conv_weight must be dense"
    assert conv_state.is_contiguous() and state.is_contiguous() and state_slots.is_contiguous()
    out = projected.new_empty(num_rows, num_v_heads * head_v_dim) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    mixed = torch.empty(num_rows, conv_weight.shape[0], dtype=torch.float32, device=projected.device)
    if num_rows:
        _gdn_decode_kernel[(num_k_heads, num_rows)](
            projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state, state_slots,
            checkpoint_slots, mixed, out, projected.stride(0), eps,
            HK=num_k_heads, HV=num_v_heads, K=head_k_dim, V=head_v_dim, W=kernel,
            BLOCK_K=triton.next_power_of_2(head_k_dim), BLOCK_V=min(block_v, triton.next_power_of_2(head_v_dim)),
            BLOCK_G=triton.next_power_of_2(num_v_heads // num_k_heads * head_v_dim),
            HAS_BIAS=conv_bias is not None, HAS_CHECKPOINTS=checkpoint_slots is not None,
            num_warps=num_warps,
        )  # fmt: skip
    return out
