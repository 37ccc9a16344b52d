"""The short causal convolution of one token or a few, for rows that continue a state.

One kernel serves the step with SiLU and the double-gated step of LFM2; fused decode kernels use its parts.
"""

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.convolution import causal_conv1d_update, causal_conv1d_verify, short_conv_decode, short_conv_verify
from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2


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
    """The convolution of the last inputs with ``newest`` behind them, float32, and the last ``W - 1`` inputs then.

    Where the compiler may choose which product of a sum to round, one token gets other bits than the same in a few.
    """
    y = newest.to(tl.float32) * taps[W - 1].to(tl.float32)
    later = ()
    for j in tl.static_range(W - 1):
        y = tl.fma(kept[j].to(tl.float32), taps[j].to(tl.float32), y)
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


@jit(do_not_specialize_on_alignment=["state_slots", "slots"])
def _conv_update_kernel(
    x, weight, bias, conv_state, state_slots, slots, out, stride_x,
    C: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr, DOUBLE_GATED: tl.constexpr,
    SILU: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute T tokens of one sequence and block of channels. The state advances in place if there are no ``slots``.

    The result is the convolution of ``x``, with SiLU or without. DOUBLE_GATED: ``c * conv(b * x)`` of ``b | c | x``,
    rounded as a chain of operations in the model's dtype would.
    """
    release(EARLY, ALWAYS)
    i_seq = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    slot = tl.load(state_slots + i_seq).to(tl.int64)
    p_out = out + i_seq * T * C + channels
    if slot == 0:
        wait(EARLY)
        if not KEEP:
            for t in tl.static_range(T):
                tl.store(p_out + t * C, tl.zeros([BLOCK_C], out.dtype.element_ty), mask=mask)
        return
    p_state = conv_state + slot * C * (W - 1)
    kept, taps = load_columns(p_state, channels, mask, W - 1), load_columns(weight, channels, mask, W)
    if bias is not None:
        b_bias = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)  # what is loaded until here are weights, and states that no kernel of this step has written
    p_row = x + i_seq * T * stride_x + channels
    computed = ()
    for _ in tl.static_range(T):
        newest = tl.load(p_row, mask=mask, other=0.0)
        gate_out = newest
        if DOUBLE_GATED:
            gate_out = tl.load(p_row + C, mask=mask, other=0.0)
            newest = newest * tl.load(p_row + 2 * C, mask=mask, other=0.0)
        total, kept = take_in(newest, taps, kept, W)
        if bias is not None:
            total += b_bias
        computed = computed + ((total, gate_out, kept),)  # type: ignore[assignment]  # noqa: RUF005
        p_row += stride_x
    tl.debug_barrier()  # every thread has loaded what another one overwrites
    for t in tl.static_range(T):
        total, gate_out, kept = computed[t]
        if slots is None:
            store_inputs(p_state, kept, channels, mask, W)
        else:
            after = tl.load(slots + i_seq * T + t).to(tl.int64)
            store_inputs(conv_state + after * C * (W - 1), kept, channels, mask & (after > 0), W)
        if DOUBLE_GATED:
            result = total.to(out.dtype.element_ty) * gate_out  # type: ignore[var-annotated]
        elif SILU:
            result = (total * sigmoid(total)).to(out.dtype.element_ty)
        else:
            result = total.to(out.dtype.element_ty)
        tl.store(p_out + t * C, result, mask=mask)


@launches(causal_conv1d_update, invariant={})
def causal_conv1d_update_triton(x, weight, bias, conv_state, state_slots, *, silu, out) -> Tensor:
    return _launch(x, weight, bias, conv_state, (state_slots, None), out, silu=silu)


@launches(causal_conv1d_verify, invariant={})
def causal_conv1d_verify_triton(x, weight, bias, conv_state, state_slots, slots, *, silu) -> Tensor:
    return _launch(x, weight, bias, conv_state, (state_slots, slots), None, silu=silu)


@launches(short_conv_decode, invariant={})
def short_conv_decode_triton(projected, weight, bias, conv_state, state_slots, *, out) -> Tensor:
    return _launch(projected, weight, bias, conv_state, (state_slots, None), out, double_gated=True)


@launches(short_conv_verify, invariant={})
def short_conv_verify_triton(projected, weight, bias, conv_state, state_slots, slots) -> Tensor:
    return _launch(projected, weight, bias, conv_state, (state_slots, slots), None, double_gated=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, places: tuple[Tensor, Tensor | None],
    out: Tensor | None, *, double_gated: bool = False, silu: bool = False,
) -> Tensor:  # fmt: skip
    """``places``: slots of the states before the tokens, and those after each token; None: one token, in place."""
    num_rows, (num_channels, kernel) = x.shape[0], weight.shape
    state_slots, slots = places
    assert x.stride(1) == 1 and weight.is_contiguous() and conv_state.is_contiguous()
    assert state_slots.is_contiguous() and (slots is None or slots.is_contiguous())
    keep, out = out is not None, x.new_empty(num_rows, num_channels) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        block = min(256 if double_gated else 512, next_power_of_2(num_channels))
        _conv_update_kernel[(len(state_slots), cdiv(num_channels, block))](
            x, weight, bias, conv_state, state_slots, slots, out, x.stride(0),
            C=num_channels, W=kernel, T=1 if slots is None else slots.shape[1], BLOCK_C=block,
            DOUBLE_GATED=double_gated, SILU=silu, KEEP=keep, num_warps=4, **early_launch(x.device),
        )  # fmt: skip
    return out
