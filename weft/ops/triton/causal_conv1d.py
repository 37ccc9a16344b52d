"""Kernels of the short causal convolution: chunks of prefill sequences, and one step for decoding rows.

Job: ``causal_conv1d`` and ``causal_conv1d_update`` on the GPU, one launch each. Owns: who reads and who writes a state.
Does not know: what the channels mean.

Prefill: one program per chunk of the chunk table and block of channels. Only tokens and chunk ends closer than
``W - 1`` to a sequence's start see its old state. All of them, and the write of the sequence's final state over the old
one, belong to the program of the *first* chunk, so no two programs race for a state.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch

CHUNK_SIZE = 64
_BLOCK_C = 64
_UPDATE_BLOCK_C = 256

# Pointers into the step's packed metadata: their alignment changes from step to step and must not compile a new kernel.
_METADATA = [
    "chunk_seq", "chunk_start", "chunk_length", "checkpoint_slot", "first_chunk", "cu_seqlens_q", "seq_lens",
    "state_slots",
]  # fmt: skip


@triton.jit
def _input(
    x, p_state, tokens, begin, continues, channels, mask, stride_x, HISTORY: tl.constexpr, MAY_PRECEDE: tl.constexpr
):  # fmt: skip
    """Inputs of some tokens and channels, float32; those before the sequence's ``begin`` stand in its state.

    ``p_state``: the sequence's states ``[C, HISTORY]``. Without ``MAY_PRECEDE`` no token lies before ``begin``.
    """
    value = tl.load(x + tokens * stride_x + channels, mask=mask & (tokens >= begin), other=0.0).to(tl.float32)
    if MAY_PRECEDE:
        before = p_state + channels * HISTORY + (tokens - begin + HISTORY)
        value += tl.load(before, mask=mask & (tokens < begin) & continues, other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolve_rows(
    x, weight, bias, out, p_state, tokens, valid, begin, continues, channels, c_mask, stride_x,
    C: tl.constexpr, HISTORY: tl.constexpr, HAS_BIAS: tl.constexpr, MAY_PRECEDE: tl.constexpr,
):  # fmt: skip
    """Outputs of some tokens of one sequence."""
    mask = valid[:, None] & c_mask[None, :]
    columns = channels[None, :]
    total = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    for j in tl.static_range(HISTORY + 1):
        rows = (tokens - HISTORY + j)[:, None]
        value = _input(x, p_state, rows, begin, continues, columns, mask, stride_x, HISTORY, MAY_PRECEDE)
        tap = tl.load(weight + channels * (HISTORY + 1) + j, mask=c_mask, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    total *= tl.sigmoid(total)
    tl.store(out + tokens[:, None] * C + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_state(
    x, conv_state, p_state, slot, end, begin, continues, channels, c_mask, stride_x,
    C: tl.constexpr, HISTORY: tl.constexpr, MAY_PRECEDE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Write the state after token ``end - 1`` into ``slot``."""
    for j in tl.static_range(HISTORY):
        value = _input(
            x, p_state, end - HISTORY + j, begin, continues, channels, c_mask, stride_x, HISTORY, MAY_PRECEDE
        )  # fmt: skip
        if IN_PLACE:
            tl.debug_barrier()  # every thread has loaded what another one overwrites
        target = conv_state + (slot * C + channels) * HISTORY + j
        tl.store(target, value.to(conv_state.dtype.element_ty), mask=c_mask)


@triton.jit
def _zero_rows(out, begin, end, channels, c_mask, C: tl.constexpr, CHUNK: tl.constexpr):
    for row in range(begin, end, CHUNK):
        rows = (row + tl.arange(0, CHUNK)).to(tl.int64)
        zeros = tl.zeros([CHUNK, channels.shape[0]], out.dtype.element_ty)
        tl.store(out + rows[:, None] * C + channels[None, :], zeros, mask=(rows < end)[:, None] & c_mask[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=_METADATA)
def _conv_kernel(
    x, weight, bias, out, conv_state,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_x,
    C: tl.constexpr, HISTORY: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One chunk and block of channels."""
    i_chunk = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = channels < C
    if i_chunk == 0:  # rows that belong to no prefill sequence
        num_tokens = tl.load(cu_seqlens_q + num_seqs)
        _zero_rows(out, num_tokens, num_rows, channels, c_mask, C, CHUNK)
        decodes = num_tokens
        if tl.load(first_chunk + num_seqs) > 0:
            decodes = tl.load(chunk_start)
        _zero_rows(out, 0, decodes, channels, c_mask, C, CHUNK)
    length = tl.load(chunk_length + i_chunk)
    if length == 0:
        return
    seq = tl.load(chunk_seq + i_chunk)
    start = tl.load(chunk_start + i_chunk).to(tl.int64)
    begin, end = tl.load(cu_seqlens_q + seq).to(tl.int64), tl.load(cu_seqlens_q + seq + 1).to(tl.int64)
    continues = tl.load(seq_lens + seq) != end - begin
    slot = tl.load(state_slots + seq).to(tl.int64)
    p_state = conv_state + slot * C * HISTORY
    tokens = start + tl.arange(0, CHUNK)
    valid = (tokens < start + length) & (tokens - begin >= HISTORY)
    _convolve_rows(
        x, weight, bias, out, p_state, tokens, valid, begin, continues, channels, c_mask, stride_x,
        C, HISTORY, HAS_BIAS, False,
    )  # fmt: skip
    first = tl.load(first_chunk + seq)
    if i_chunk == first:
        leading = begin + tl.arange(0, BLOCK_H)
        exists = leading < tl.minimum(begin + HISTORY, end)
        _convolve_rows(
            x, weight, bias, out, p_state, leading, exists, begin, continues, channels, c_mask, stride_x,
            C, HISTORY, HAS_BIAS, True,
        )  # fmt: skip
        last = tl.load(first_chunk + seq + 1)
        for i in range(first, tl.minimum(first + HISTORY, last)):  # no other chunk can end so early
            order = tl.load(checkpoint_slot + i).to(tl.int64)
            stop = tl.load(chunk_start + i).to(tl.int64) + tl.load(chunk_length + i)
            if (order >= 0) & (stop - begin < HISTORY):
                _store_state(
                    x, conv_state, p_state, order, stop, begin, continues, channels, c_mask, stride_x,
                    C, HISTORY, True, False,
                )  # fmt: skip
        tl.debug_barrier()
        _store_state(
            x, conv_state, p_state, slot, end, begin, continues, channels, c_mask, stride_x, C, HISTORY, True, True
        )  # fmt: skip
    order = tl.load(checkpoint_slot + i_chunk).to(tl.int64)
    if (order >= 0) & (start + length - begin >= HISTORY):
        _store_state(
            x, conv_state, p_state, order, start + length, begin, continues, channels, c_mask, stride_x,
            C, HISTORY, False, False,
        )  # fmt: skip


def causal_conv1d_triton(x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, batch: Batch) -> Tensor:
    """Triton kernel of ``causal_conv1d``. The batch's chunk table says which tokens form which sequence."""
    chunks, (num_rows, num_channels), history = batch.chunks, x.shape, weight.shape[1] - 1
    assert chunks is not None, "prefill sequences need a chunk table"
    assert x.stride(1) == 1 and weight.is_contiguous() and conv_state.is_contiguous()
    out = x.new_empty(x.shape)
    _conv_kernel[(chunks.start.shape[0], triton.cdiv(num_channels, _BLOCK_C))](
        x, weight, bias, out, conv_state,
        chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first,
        batch.cu_seqlens_q, batch.seq_lens, batch.state_slots,
        num_rows, chunks.first.shape[0] - 1, x.stride(0),
        C=num_channels, HISTORY=history, BLOCK_C=_BLOCK_C, BLOCK_H=triton.next_power_of_2(history), CHUNK=CHUNK_SIZE,
        HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["state_slots"])
def _update_kernel(
    x, weight, bias, out, conv_state, state_slots, stride_x,
    C: tl.constexpr, HISTORY: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One row and block of channels."""
    i_row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    slot = tl.load(state_slots + i_row).to(tl.int64)
    p_state = conv_state + (slot * C + channels) * HISTORY
    newest = tl.load(x + i_row * stride_x + channels, mask=mask, other=0.0)
    p_weight = weight + channels * (HISTORY + 1)
    total = newest.to(tl.float32) * tl.load(p_weight + HISTORY, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(HISTORY):
        value = tl.load(p_state + j, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(p_weight + j, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    total *= tl.sigmoid(total)
    tl.store(out + i_row * C + channels, total.to(out.dtype.element_ty), mask=mask)
    for j in tl.static_range(HISTORY):
        if j < HISTORY - 1:
            value = tl.load(p_state + j + 1, mask=mask)
        else:
            value = newest.to(conv_state.dtype.element_ty)
        tl.debug_barrier()  # every thread has loaded what another one overwrites
        tl.store(p_state + j, value, mask=mask)


def causal_conv1d_update_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, state_slots: Tensor
) -> Tensor:
    """Triton kernel of ``causal_conv1d_update``."""
    num_rows, num_channels = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and conv_state.is_contiguous() and state_slots.is_contiguous()
    out = x.new_empty(x.shape)
    if num_rows:
        _update_kernel[(num_rows, triton.cdiv(num_channels, _UPDATE_BLOCK_C))](
            x, weight, bias, out, conv_state, state_slots, x.stride(0),
            C=num_channels, HISTORY=weight.shape[1] - 1, BLOCK_C=_UPDATE_BLOCK_C, HAS_BIAS=bias is not None,
            num_warps=4,
        )  # fmt: skip
    return out
