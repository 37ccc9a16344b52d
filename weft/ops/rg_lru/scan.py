"""RG-LRU on the GPU: a program walks through one sequence's tokens with the states of some channels.

Job: ``rg_lru`` and ``rg_lru_step``, one launch each. A tile of tokens is one associative scan of pairs (decay, input).
Does not know: projections, convolution.

Graph-safe: grids depend on padded sizes alone; sequences without chunks leave at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.ops.backend import launches
from weft.ops.rg_lru import rg_lru, rg_lru_step
from weft.ops.triton.chunk_scan import METADATA, find_chunks, metadata, read_state, store_checkpoint
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.elementwise import sigmoid, softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK_C = 64
_TOKENS = 16
"""Tokens of one scan; chunks end anywhere, the others of a tile are then masked."""


@triton.jit
def _token(b_x, b_input, b_recurrent, b_rate):
    """Log decay, and gated input, of any number of tokens."""
    return sigmoid(b_recurrent) * b_rate, b_x * sigmoid(b_input)


@triton.jit
def _after(decay_1, input_1, decay_2, input_2):
    """Two steps of a recurrence as one."""
    return decay_1 * decay_2, input_1 * decay_2 + input_2


@jit(do_not_specialize_on_alignment=["state_slots"])
def _rg_lru_step_kernel(
    x, gates, decay, state, state_slots, out, stride_x,
    C: tl.constexpr, BLOCK_C: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row and block of channels."""
    release(EARLY)
    i_row = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = o_c < C
    slot = tl.load(state_slots + i_row).to(tl.int64)
    if slot == 0:
        wait(EARLY)
        if not KEEP:
            tl.store(out + i_row * C + o_c, tl.zeros([BLOCK_C], out.dtype.element_ty), mask=c_mask)
        return
    p_state = state + slot * C + o_c
    b_state = tl.load(p_state, mask=c_mask, other=0.0).to(tl.float32)
    b_rate = -8.0 * softplus(tl.load(decay + o_c, mask=c_mask, other=0.0).to(tl.float32))
    wait(EARLY)
    p_gates = gates + i_row * 2 * C + o_c
    b_x = tl.load(x + i_row * stride_x + o_c, mask=c_mask, other=0.0).to(tl.float32)
    b_input = tl.load(p_gates, mask=c_mask, other=0.0).to(tl.float32)
    b_recurrent = tl.load(p_gates + C, mask=c_mask, other=0.0).to(tl.float32)
    log_a, gated = _token(b_x, b_input, b_recurrent, b_rate)
    b_state = tl.exp(log_a) * b_state + tl.sqrt(1.0 - tl.exp(2.0 * log_a)) * gated
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=c_mask)
    tl.store(out + i_row * C + o_c, b_state.to(out.dtype.element_ty), mask=c_mask)


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _rg_lru_kernel(
    x, gates, decay, state, out,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_x,
    C: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one sequence and block of channels: its tokens in order, the state in registers."""
    enter(EARLY)
    i_prefill = tl.program_id(1)
    o_t, o_c = tl.arange(0, TOKENS), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = o_c < C
    i_seq, first, last = find_chunks(
        out, chunk_seq, chunk_start, first_chunk, cu_seqlens_q, num_rows, num_seqs, 0, i_prefill, o_c, c_mask,
        1, C, CHUNK,
    )  # fmt: skip
    if first == last:
        return
    p_state, b_state = read_state(state, cu_seqlens_q, seq_lens, state_slots, i_seq, 0, o_c, c_mask, 1, C)
    begin = tl.load(cu_seqlens_q + i_seq)
    begins = tl.load(seq_lens + i_seq) == tl.load(cu_seqlens_q + i_seq + 1) - begin
    b_rate = -8.0 * softplus(tl.load(decay + o_c, mask=c_mask, other=0.0).to(tl.float32))
    for i_chunk in range(first, last):
        start = tl.load(chunk_start + i_chunk)
        end = start + tl.load(chunk_length + i_chunk)
        for token in range(start, end, TOKENS):
            rows = (token + o_t).to(tl.int64)
            mask = (rows < end)[:, None] & c_mask[None, :]
            p_gates = gates + rows[:, None] * 2 * C + o_c[None, :]
            b_x = tl.load(x + rows[:, None] * stride_x + o_c[None, :], mask=mask, other=0.0).to(tl.float32)
            b_input = tl.load(p_gates, mask=mask, other=0.0).to(tl.float32)
            b_recurrent = tl.load(p_gates + C, mask=mask, other=0.0).to(tl.float32)
            log_a, gated = _token(b_x, b_input, b_recurrent, b_rate[None, :])
            is_first = begins & (rows == begin)
            factor = tl.where(is_first[:, None], 1.0, tl.sqrt(1.0 - tl.exp(2.0 * log_a)))
            # Rows past the end leave the state as it is.
            decays = tl.where(mask, tl.exp(log_a), 1.0)
            inputs = tl.where(mask, factor * gated, 0.0)
            decays, inputs = tl.associative_scan((decays, inputs), 0, _after)
            states = decays * b_state[None, :] + inputs
            tl.store(out + rows[:, None] * C + o_c[None, :], states.to(out.dtype.element_ty), mask=mask)
            b_state = tl.sum(tl.where((o_t == TOKENS - 1)[:, None], states, 0.0), 0)
        store_checkpoint(state, checkpoint_slot, i_chunk, 0, o_c, c_mask, b_state, 1, C)
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=c_mask)


@launches(rg_lru_step, invariant={})
def rg_lru_step_triton(x, gates, decay, state, state_slots, *, out) -> Tensor:
    num_rows, channels = x.shape
    _check(x, gates, state)
    keep, out = out is not None, x.new_empty(x.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        block = min(_BLOCK_C, next_power_of_2(channels))
        _rg_lru_step_kernel[(cdiv(channels, block), num_rows)](
            x, gates, decay, state, state_slots, out, x.stride(0),
            C=channels, BLOCK_C=block, KEEP=keep, num_warps=1, **early_launch(x.device),
        )  # fmt: skip
    return out


@launches(rg_lru, invariant={})
def rg_lru_triton(x, gates, decay, state, batch) -> Tensor:
    chunks, (num_rows, channels) = batch.chunk_table, x.shape
    _check(x, gates, state)
    out = x.new_empty(x.shape)
    block = min(_BLOCK_C, next_power_of_2(channels))
    _rg_lru_kernel[(cdiv(channels, block), chunks.max_seqs)](
        x, gates, decay, state, out, *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1, x.stride(0),
        C=channels, BLOCK_C=block, TOKENS=_TOKENS, CHUNK=CHUNK_SIZE, num_warps=2, **early_launch(x.device),
    )  # fmt: skip
    return out


def _check(x: Tensor, gates: Tensor, state: Tensor) -> None:
    assert x.stride(1) == 1, "channels must be dense"
    assert gates.is_contiguous() and state.is_contiguous()
