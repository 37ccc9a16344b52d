"""The short depthwise causal convolution of recurrent layers, and the double-gated one of LFM2.

Job: ``y_t = silu(bias + sum_j weight[:, j] * x_{t - (W - 1) + j})``, and ``c * conv(b * x)`` from the merged projection
``b | c | x``; chunks for prefill and one step for decoding rows. Owns: the convolution state, which holds the last
``W - 1`` *inputs* of the convolution, oldest first. Does not know: what the channels mean, the projections, or slots'
owners.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.forward_context import Batch, ChunkTable
from weft.ops.backend import Backend, with_kernel
from weft.ops.device_work import device_work
from weft.ops.padding import clear_padding, settle_padding
from weft.ops.rows import by_chunk, by_row, by_sequence
from weft.ops.verification import decode_each_token


@with_kernel("weft.ops.convolution.prefill", by_chunk("x", states=("conv_state",)))
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    batch: Batch,
    *,
    silu: bool = True,
    backend: Backend,
) -> Tensor:
    """Convolve the sequences from ``batch.num_decodes`` on; read and update their states.

    Args:
        x: ``[T, C]``.
        weight: ``[C, W]``, W at least 2.
        bias: ``[C]`` or None.
        conv_state: ``[num_slots, C, W - 1]``. A sequence starts from the state in its slot of ``batch.state_slots``, or
            from zero if it begins in this step. The final state is written to the same slot, and the state after a
            chunk to the chunk's ``checkpoint_slot``, if any.
        silu: whether SiLU follows the convolution.

    Returns:
        ``[T, C]`` in x's dtype; rows outside those sequences are zero.
    """
    # Every sequence is laid out after its state in one long buffer, with ``W - 1`` rows of state before its tokens.
    # The state after any token is then the ``W - 1`` rows that end there, however short the sequence or chunk.
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if batch.mixed is not None:
        given = {"x": x, "weight": weight, "bias": bias, "silu": silu}
        return device_work(causal_conv1d.reference, batch, out, given, {"conv_state": conv_state})
    first, last = batch.num_decodes, batch.num_seqs
    if first == last:
        return out
    history = weight.shape[1] - 1
    begin, end = first, batch.num_tokens  # a decode row has one token each
    starts = batch.cu_seqlens_q[first : last + 1].long()
    query_lens = starts.diff()
    count = last - first
    # Row of the buffer at which each sequence's tokens start, and each token's own row.
    bases = starts[:-1] - begin + history * torch.arange(1, count + 1, device=x.device)
    rows = torch.arange(end - begin, device=x.device) + (bases - starts[:-1] + begin).repeat_interleave(
        query_lens, output_size=end - begin
    )
    before = torch.arange(-history, 0, device=x.device)
    slots = batch.state_slots[first:last].long()
    continues = (batch.seq_lens[first:last] != query_lens)[:, None, None]
    initial = torch.where(continues, conv_state.index_select(0, slots), 0.0).transpose(1, 2)

    buffer = x.new_empty(end - begin + count * history, x.shape[1])
    buffer[rows] = x[begin:end]
    buffer[bases[:, None] + before] = initial.to(x.dtype)
    out[begin:end] = _convolve(buffer, weight, bias, silu)[rows - history]
    conv_state.index_copy_(0, slots, _states(buffer, bases + query_lens, before, conv_state))
    _store_checkpoints(buffer, bases - starts[:-1], before, conv_state, batch, batch.chunk_table)
    return out


def _convolve(buffer: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``[L, C]`` -> ``[L - (W - 1), C]``: row i of the result sees rows i to i + W - 1 of the buffer."""
    taps = weight.float().unbind(1)
    length = buffer.shape[0] - len(taps) + 1
    y = buffer[:length] * taps[0]
    for j, tap in enumerate(taps[1:], start=1):
        y.addcmul_(buffer[j : j + length], tap)
    if bias is not None:
        y += bias.float()
    return (F.silu(y) if silu else y).to(buffer.dtype)


def _states(buffer: Tensor, ends: Tensor, before: Tensor, conv_state: Tensor) -> Tensor:
    """The states after the tokens that end before rows ``ends``: ``[N, C, W - 1]``."""
    return buffer[ends[:, None] + before].transpose(1, 2).to(conv_state.dtype)


def _store_checkpoints(
    buffer: Tensor, shifts: Tensor, before: Tensor, conv_state: Tensor, batch: Batch, chunks: ChunkTable
) -> None:
    """Store the states of chunks that have a checkpoint slot; ``shifts[s]`` turns a token index into a buffer row."""
    ending = (chunks.checkpoint_slot >= 0).nonzero().flatten()
    if ending.numel():
        ends = chunks.start[ending] + chunks.length[ending]
        ends = ends + shifts[chunks.seq[ending].long() - batch.num_decodes]
        slots = chunks.checkpoint_slot[ending].long()
        conv_state.index_copy_(0, slots, _states(buffer, ends, before, conv_state))


def causal_conv1d_update_reference(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """Compute one step for N rows that continue a state, as torch operations. States advance in place.

    Part of ``gdn_decode`` and ``short_conv_decode``.

    Args:
        x: ``[N, C]``.
        weight: ``[C, W]``, W at least 2.
        conv_state: ``[num_slots, C, W - 1]``.
        state_slots: ``[N]`` integers; only slot 0 (padding) may occur more than once.
        bias: ``[C]`` or None.
        silu: whether SiLU follows the convolution.

    Returns:
        ``[N, C]`` in x's dtype.
    """
    slots = state_slots.long()
    old = conv_state.index_select(0, slots)
    conv_state.index_copy_(0, slots, _shifted(old, x))
    *early, last = weight.float().t().contiguous()
    y = x * last
    # One copy to tap-major order: sums over a last dimension of two or three would cost far more.
    for inputs, tap in zip(old.permute(2, 0, 1).to(y.dtype).contiguous(), early, strict=True):
        y.addcmul_(inputs, tap)
    if bias is not None:
        y = y + bias.float()
    return (F.silu(y) if silu else y).to(x.dtype)


def _shifted(old: Tensor, x: Tensor) -> Tensor:
    """States ``[N, C, W - 1]`` one step on: the oldest input leaves, ``x [N, C]`` enters.

    In flat memory, dropping each channel's first entry is a shift by one; what crosses into the neighbouring channel
    is the place where x goes.
    """
    new = torch.empty_like(old)
    new.flatten(1)[:, :-1] = old.flatten(1)[:, 1:]
    new[..., -1] = x
    return new


@with_kernel("weft.ops.convolution.decode", by_row("x", "state_slots"))
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    silu: bool = True,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """The convolution of one token for each of N rows that continue a state; the states advance in place.

    Args:
        x: ``[N, C]``; rows may be strided.
        weight: ``[C, W]``, W at least 2.
        bias: ``[C]`` or None.
        conv_state: ``[num_slots, C, W - 1]``.
        state_slots: ``[N]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out [N, C]``.
        silu: whether SiLU follows the convolution.

    Returns:
        ``[N, C]`` in x's dtype.
    """
    y = causal_conv1d_update_reference(x, weight, conv_state, state_slots, bias=bias, silu=silu)
    return settle_padding(y, state_slots, out)


@with_kernel("weft.ops.convolution.decode", by_sequence("x", "state_slots", "slots"))
def causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    slots: Tensor,
    *,
    silu: bool = True,
    backend: Backend,
) -> Tensor:
    """The convolution of T tokens for each of S sequences that continue a state, with the state after every token.

    Args:
        x: ``[S * T, C]``, the tokens of a sequence side by side; rows may be strided.
        weight, bias, conv_state, silu: as of ``causal_conv1d_update``.
        state_slots: ``[S]`` int32, the slots that hold the states before these tokens. Slot 0: the sequence is padding,
            and its output is zero.
        slots: ``[S, T]`` int32, the slots that receive the states after each token; 0: nothing is kept. A slot of
            ``state_slots`` may occur in its own row. No other slot occurs twice.

    Returns:
        ``[S * T, C]`` in x's dtype.
    """

    def decode(x: Tensor, state: Tensor, state_slots: Tensor) -> Tensor:
        return causal_conv1d_update.reference(x, weight, bias, state, state_slots, silu=silu)

    return decode_each_token(decode, [x], [conv_state], state_slots, slots)


@with_kernel("weft.ops.convolution.prefill", by_chunk("projected", states=("conv_state",)))
def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    batch: Batch,
    *,
    backend: Backend,
) -> Tensor:
    """The sequences from ``batch.num_decodes`` on; reads and updates their states.

    Args:
        projected: ``[T, 3 * C]``: ``b | c | x``.
        weight, bias, conv_state: as in ``causal_conv1d``.

    Returns:
        ``[T, C]`` in the dtype of ``projected``; rows outside those sequences are zero.
    """
    gate_in, gate_out, x = projected.chunk(3, dim=-1)
    y = causal_conv1d.reference(gate_in * x, weight, bias, conv_state, batch, silu=False)
    return clear_padding(y.mul_(gate_out), batch.num_tokens)


@with_kernel("weft.ops.convolution.decode", by_row("projected", "state_slots"))
def short_conv_decode(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one step for N rows that continue a state. The states advance in place.

    Args:
        projected: ``[N, 3 * C]``: ``b | c | x``.
        weight, bias, conv_state, state_slots, out: as in ``causal_conv1d_update``. The state of slot 0 may change.

    Returns:
        ``[N, C]`` in the dtype of ``projected``; without ``out`` rows of slot 0 are zero.
    """
    gate_in, gate_out, x = projected.chunk(3, dim=-1)
    y = causal_conv1d_update_reference(gate_in * x, weight, conv_state, state_slots, bias=bias, silu=False)
    return settle_padding(y * gate_out, state_slots, out)


@with_kernel("weft.ops.convolution.decode", by_sequence("projected", "state_slots", "slots"))
def short_conv_verify(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_slots: Tensor,
    slots: Tensor,
    *,
    backend: Backend,
) -> Tensor:
    """Compute T tokens for each of S sequences that continue a state, with the state after every token.

    Args:
        projected: ``[S * T, 3 * C]``: ``b | c | x``, the tokens of a sequence side by side.
        weight, bias, conv_state, state_slots, slots: as in ``causal_conv1d_verify``.

    Returns:
        ``[S * T, C]`` in the dtype of ``projected``.
    """

    def decode(x: Tensor, state: Tensor, state_slots: Tensor) -> Tensor:
        return short_conv_decode.reference(x, weight, bias, state, state_slots)

    return decode_each_token(decode, [projected], [conv_state], state_slots, slots)
