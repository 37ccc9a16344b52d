"""The decode step of the double-gated short convolution as one kernel."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.ops.triton.conv_update import load_columns, store_inputs, take_in
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK_C = 256


@jit(do_not_specialize_on_alignment=["state_slots"])
def _short_conv_kernel(
    projected, weight, bias, conv_state, state_slots, out, stride_projected,
    C: tl.constexpr, W: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row and block of channels; products are rounded as a chain of operations in the model's dtype would."""
    release(EARLY)
    i_row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    slot = tl.load(state_slots + i_row).to(tl.int64)
    p_out = out + i_row * C + channels
    if slot == 0:
        wait(EARLY)
        if not KEEP:
            tl.store(p_out, tl.zeros([BLOCK_C], out.dtype.element_ty), mask=mask)
        return
    p_state = conv_state + slot * C * (W - 1)
    kept, taps = load_columns(p_state, channels, mask, W - 1), load_columns(weight, channels, mask, W)
    if HAS_BIAS:
        b_bias = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)
    p_row = projected + i_row * stride_projected + channels
    gate_in = tl.load(p_row, mask=mask, other=0.0)
    gate_out = tl.load(p_row + C, mask=mask, other=0.0)
    newest = gate_in * tl.load(p_row + 2 * C, mask=mask, other=0.0)
    total, kept = take_in(newest, taps, kept, W)
    if HAS_BIAS:
        total += b_bias
    tl.debug_barrier()  # every thread has loaded what another one overwrites
    store_inputs(p_state, kept, channels, mask, W)
    tl.store(p_out, total.to(out.dtype.element_ty) * gate_out, mask=mask)


def short_conv_decode_triton(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Triton kernel of ``short_conv_decode``."""
    num_rows, num_channels = projected.shape[0], weight.shape[0]
    assert projected.stride(1) == 1 and weight.is_contiguous() and conv_state.is_contiguous()
    assert state_slots.is_contiguous() and (out is None or out.is_contiguous())
    keep, out = out is not None, projected.new_empty(num_rows, num_channels) if out is None else out
    if num_rows:
        block = min(_BLOCK_C, next_power_of_2(num_channels))
        _short_conv_kernel[(num_rows, cdiv(num_channels, block))](
            projected, weight, bias, conv_state, state_slots, out, projected.stride(0),
            C=num_channels, W=weight.shape[1], BLOCK_C=block, HAS_BIAS=bias is not None, KEEP=keep,
            num_warps=4, **early_launch(projected.device),
        )  # fmt: skip
    return out
