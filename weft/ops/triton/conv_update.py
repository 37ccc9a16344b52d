"""One step of the short causal convolution with SiLU, for rows that continue a state, as one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK_C = 512


@triton.jit
def push_and_convolve(
    newest, weight, bias, conv_state, slot, channels, mask,
    C: tl.constexpr, HISTORY: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The convolution of a slot's last inputs with ``newest`` behind them, float32; they move up by one."""
    p_state = conv_state + (slot * C + channels) * HISTORY
    p_weight = weight + channels * (HISTORY + 1)
    total = newest.to(tl.float32) * tl.load(p_weight + HISTORY, mask=mask, other=0.0).to(tl.float32)
    values = ()
    for j in tl.static_range(HISTORY):
        value = tl.load(p_state + j, mask=mask, other=0.0)
        total += value.to(tl.float32) * tl.load(p_weight + j, mask=mask, other=0.0).to(tl.float32)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread has loaded what another one overwrites
    for j in tl.static_range(HISTORY - 1):
        tl.store(p_state + j, values[j + 1], mask=mask)
    tl.store(p_state + HISTORY - 1, newest.to(conv_state.dtype.element_ty), mask=mask)
    return total


@jit(do_not_specialize_on_alignment=["state_slots"])
def _conv_update_kernel(
    x, weight, bias, conv_state, state_slots, out, stride_x,
    C: tl.constexpr, HISTORY: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row and block of channels."""
    enter(EARLY)
    i_row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    slot = tl.load(state_slots + i_row).to(tl.int64)
    p_out = out + i_row * C + channels
    if slot == 0:
        if not KEEP:
            tl.store(p_out, tl.zeros([BLOCK_C], out.dtype.element_ty), mask=mask)
        return
    newest = tl.load(x + i_row * stride_x + channels, mask=mask, other=0.0)
    total = push_and_convolve(newest, weight, bias, conv_state, slot, channels, mask, C, HISTORY, HAS_BIAS)
    tl.store(p_out, (total * sigmoid(total)).to(out.dtype.element_ty), mask=mask)


def causal_conv1d_update_triton(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``causal_conv1d_update_reference`` with SiLU in one launch; rows with slot 0 are zero, or left as they are in a
    given ``out``. ``x`` may be strided."""
    num_rows, num_channels = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and conv_state.is_contiguous() and state_slots.is_contiguous()
    keep, out = out is not None, x.new_empty(x.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        block = min(_BLOCK_C, next_power_of_2(num_channels))
        _conv_update_kernel[(num_rows, cdiv(num_channels, block))](
            x, weight, bias, conv_state, state_slots, out, x.stride(0),
            C=num_channels, HISTORY=weight.shape[1] - 1, BLOCK_C=block, HAS_BIAS=bias is not None, KEEP=keep,
            num_warps=4, **early_launch(x.device),
        )  # fmt: skip
    return out
