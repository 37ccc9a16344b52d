"""One step of the short causal convolution, for rows that continue a state: its parts, and with SiLU as one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK_C = 512


@triton.jit
def load_columns(p, channels, mask, COUNT: tl.constexpr):
    """Some rows of ``p [C, COUNT]``, column by column: the last inputs of channels, oldest first, or their taps."""
    columns = ()
    for j in tl.static_range(COUNT):
        value = tl.load(p + channels * COUNT + j, mask=mask, other=0.0)
        columns = columns + (value,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    return columns


@triton.jit
def take_in(newest, taps, kept, W: tl.constexpr):
    """The convolution of the last inputs with ``newest`` behind them, float32, and the last ``W - 1`` inputs then."""
    y = newest.to(tl.float32) * taps[W - 1].to(tl.float32)
    later = ()
    for j in tl.static_range(W - 1):
        y += kept[j].to(tl.float32) * taps[j].to(tl.float32)
        if j > 0:
            later = later + (kept[j],)  # type: ignore[assignment]  # noqa: RUF005
    later = later + (newest.to(kept[0].dtype),)  # type: ignore[assignment]  # noqa: RUF005
    return y, later


@triton.jit
def convolve(row, taps, kept, channels, mask, W: tl.constexpr):
    """``silu(conv)`` of some channels, ``[len(channels)]`` float32, and their last ``W - 1`` inputs with the newest."""
    newest = tl.load(row + channels, mask=mask, other=0.0)
    y, later = take_in(newest, taps, kept, W)
    return y * tl.sigmoid(y), later


@triton.jit
def store_inputs(p_state, kept, channels, mask, W: tl.constexpr):
    """Write some channels' states."""
    for j in tl.static_range(W - 1):
        tl.store(p_state + channels * (W - 1) + j, kept[j], mask=mask)


@jit(do_not_specialize_on_alignment=["state_slots"])
def _conv_update_kernel(
    x, weight, bias, conv_state, state_slots, out, stride_x,
    C: tl.constexpr, W: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row and block of channels."""
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
    wait(EARLY)  # what is loaded until here are weights, and states that no kernel of this step has written
    newest = tl.load(x + i_row * stride_x + channels, mask=mask, other=0.0)
    total, kept = take_in(newest, taps, kept, W)
    if HAS_BIAS:
        total += b_bias
    tl.debug_barrier()  # every thread has loaded what another one overwrites
    store_inputs(p_state, kept, channels, mask, W)
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
            C=num_channels, W=weight.shape[1], BLOCK_C=block, HAS_BIAS=bias is not None, KEEP=keep,
            num_warps=4, **early_launch(x.device),
        )  # fmt: skip
    return out
