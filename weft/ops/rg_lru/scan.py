"""RG-LRU on the GPU: one program for a chunk and some channels, which goes through the chunk's tokens in order.

Job: ``rg_lru_step`` in one launch and ``rg_lru`` in three. The first launch summarises each chunk: the product of its
decays, and the state after it from zero. The second computes the states before and after the chunks of each sequence,
and the third the outputs. A state after a chunk comes from the summaries alone, so its bits do not depend on the step
in which a sequence's chunk runs. Owns: the summaries. Does not know: projections, convolution.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 and sequences without chunks leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.ops.backend import launches
from weft.ops.rg_lru import rg_lru, rg_lru_step
from weft.ops.triton.chunk_scan import METADATA, find_chunks, metadata, read_state
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.elementwise import LOG2_E, sigmoid, softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK_C = 64
_TOKENS = 8
"""Tokens whose inputs are read at a time; chunks end anywhere, the others of a group are then masked."""
_CHUNKS = 16
"""Chunks whose summaries are read at a time."""


@triton.jit
def load_weights(bias, decay, o_c, c_mask, C: tl.constexpr):
    """Biases of the input gate and of the recurrent gate, and the rate of the base-2 log decay."""
    b_bias_i = tl.load(bias + o_c, mask=c_mask, other=0.0).to(tl.float32)
    b_bias_r = tl.load(bias + (C + o_c), mask=c_mask, other=0.0).to(tl.float32)
    return b_bias_i, b_bias_r, -8.0 * LOG2_E * softplus(tl.load(decay + o_c, mask=c_mask, other=0.0).to(tl.float32))


@triton.jit
def _decay_and_input(b_x, b_input, b_recurrent, b_rate, is_first):
    """Base-2 log decay, decay and input of a token, given both gates. ``is_first`` is None within a chunk.

    The root of ``1 - a^2`` and the input gate share one reciprocal root, as prefills are bound by such instructions.
    """
    log_a = sigmoid(b_recurrent) * b_rate
    a = tl.exp2(log_a)
    rest = tl.maximum(1.0 - a * a, 1e-30)
    if is_first is not None:
        rest = tl.where(is_first, 1.0, rest)
    gate = 1.0 + tl.exp2(b_input * -LOG2_E)
    return log_a, a, b_x * rest * tl.rsqrt(rest * gate * gate)


@jit(do_not_specialize_on_alignment=["state_slots"])
def _rg_lru_step_kernel(
    x, gates, bias, decay, state, state_slots, out, stride_x,
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
    b_bias_i, b_bias_r, b_rate = load_weights(bias, decay, o_c, c_mask, C)
    wait(EARLY)
    p_gates = gates + i_row * 2 * C + o_c
    b_x = tl.load(x + i_row * stride_x + o_c, mask=c_mask, other=0.0).to(tl.float32)
    b_input = tl.load(p_gates, mask=c_mask, other=0.0).to(tl.float32) + b_bias_i
    b_recurrent = tl.load(p_gates + C, mask=c_mask, other=0.0).to(tl.float32) + b_bias_r
    _, a, b_new = _decay_and_input(b_x, b_input, b_recurrent, b_rate, None)
    b_state = tl.fma(a, b_state, b_new)
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=c_mask)
    tl.store(out + i_row * C + o_c, b_state.to(out.dtype.element_ty), mask=c_mask)


@triton.jit
def _read(x, gates, begin, length, c_mask, stride_x, C: tl.constexpr, COUNT: tl.constexpr):
    """Read the inputs of ``COUNT`` tokens from the chunk's token ``begin`` on, three vectors each; zero beyond."""
    tokens = ()
    for i in tl.static_range(COUNT):
        token, here = begin + i, c_mask & (begin + i < length)
        b_x = tl.load(x + token * stride_x, mask=here, other=0.0)
        b_input = tl.load(gates + token * 2 * C, mask=here, other=0.0)
        b_recurrent = tl.load(gates + token * 2 * C + C, mask=here, other=0.0)
        tokens = tokens + (b_x, b_input, b_recurrent)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking)
    return tokens


@triton.jit
def _advance(b_log, b_state, tokens, out, weights, begins, begin, length, c_mask, C: tl.constexpr, COUNT: tl.constexpr):
    """Advance the sum of log decays, or None, and the state by the ``tokens`` that ``_read`` returned. Store them as
    outputs, if there is an ``out``."""
    for i in tl.static_range(COUNT):
        b_x, b_input = tokens[3 * i].to(tl.float32), tokens[3 * i + 1].to(tl.float32) + weights[0]
        b_recurrent = tokens[3 * i + 2].to(tl.float32) + weights[1]
        is_first = begins & (begin == 0) if i == 0 else None
        log_a, a, b_new = _decay_and_input(b_x, b_input, b_recurrent, weights[2], is_first)
        inside = begin + i < length
        b_state = tl.where(inside, tl.fma(a, b_state, b_new), b_state)
        if out is None:
            b_log += tl.where(inside, log_a, 0.0)
        else:
            tl.store(out + (begin + i) * C, b_state.to(out.dtype.element_ty), mask=c_mask & inside)
    return b_log, b_state


@jit(do_not_specialize_on_alignment=METADATA)
def _rg_lru_chunk_kernel(
    x, gates, bias, decay, summaries, out,
    chunk_seq, chunk_start, chunk_length, cu_seqlens_q, seq_lens, stride_x,
    C: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one chunk and block of channels, its tokens in order: the outputs from the state before the chunk, or
    with no ``out`` the chunk's summary."""
    enter(EARLY)
    i_chunk = tl.program_id(1).to(tl.int64)
    length = tl.load(chunk_length + i_chunk)
    if length == 0:
        return
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = o_c < C
    start = tl.load(chunk_start + i_chunk).to(tl.int64)
    x += start * stride_x + o_c
    gates += start * 2 * C + o_c
    tokens = _read(x, gates, 0, length, c_mask, stride_x, C, TOKENS)
    i_seq = tl.load(chunk_seq + i_chunk)
    first = tl.load(cu_seqlens_q + i_seq)
    begins = (start == first) & (tl.load(seq_lens + i_seq) == tl.load(cu_seqlens_q + i_seq + 1) - first)
    weights = load_weights(bias, decay, o_c, c_mask, C)
    p_summary = summaries + i_chunk * 2 * C + o_c
    b_log, b_state = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    if out is not None:
        out += start * C + o_c
        b_state = tl.load(p_summary, mask=c_mask, other=0.0)
    for token in range(0, length, 2 * TOKENS):
        # Two groups take turns: the registers of one are free for loads while the other is computed.
        ahead = _read(x, gates, token + TOKENS, length, c_mask, stride_x, C, TOKENS)
        b_log, b_state = _advance(b_log, b_state, tokens, out, weights, begins, token, length, c_mask, C, TOKENS)
        tokens = _read(x, gates, token + 2 * TOKENS, length, c_mask, stride_x, C, TOKENS)
        b_log, b_state = _advance(b_log, b_state, ahead, out, weights, False, token + TOKENS, length, c_mask, C, TOKENS)
    if out is None:
        tl.store(p_summary, tl.exp2(b_log), mask=c_mask)
        tl.store(p_summary + C, b_state, mask=c_mask)


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _rg_lru_walk_kernel(
    summaries, state, out,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs,
    C: tl.constexpr, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the states between the chunks of one sequence, for a block of channels, from the chunks' summaries. The
    state before a chunk replaces the chunk's decay."""
    enter(EARLY)
    i_prefill = tl.program_id(1)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = o_c < C
    i_seq, first, last = find_chunks(
        out, chunk_seq, chunk_start, first_chunk, cu_seqlens_q, num_rows, num_seqs, 0, i_prefill, o_c, c_mask,
        1, C, CHUNK,
    )  # fmt: skip
    if first == last:
        return
    p_state, b_state = read_state(state, cu_seqlens_q, seq_lens, state_slots, i_seq, 0, o_c, c_mask, 1, C)
    p_summary = summaries + first.to(tl.int64) * 2 * C + o_c
    for begin in range(first, last, CHUNKS):
        chunks = ()
        for i in tl.static_range(CHUNKS):
            here = c_mask & (begin + i < last)  # a chunk beyond the last one leaves the state as it is
            b_decay = tl.load(p_summary + 2 * i * C, mask=here, other=1.0)
            b_input = tl.load(p_summary + (2 * i + 1) * C, mask=here, other=0.0)
            slot = tl.load(checkpoint_slot + begin + i, mask=begin + i < last, other=-1).to(tl.int64)
            chunks = chunks + (b_decay, b_input, slot)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking)
        for i in tl.static_range(CHUNKS):
            tl.store(p_summary + 2 * i * C, b_state, mask=c_mask & (begin + i < last))
            b_state = tl.fma(chunks[3 * i], b_state, chunks[3 * i + 1])
            slot = chunks[3 * i + 2]
            tl.store(state + slot * C + o_c, b_state.to(state.dtype.element_ty), mask=c_mask & (slot >= 0))
        p_summary += 2 * CHUNKS * C
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=c_mask)


@launches(rg_lru_step, invariant={})
def rg_lru_step_triton(x, gates, bias, decay, state, state_slots, *, out) -> Tensor:
    num_rows, channels = x.shape
    _check(x, gates, bias, state)
    keep, out = out is not None, x.new_empty(x.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        block = min(_BLOCK_C, next_power_of_2(channels))
        _rg_lru_step_kernel[(cdiv(channels, block), num_rows)](
            x, gates, bias, decay, state, state_slots, out, x.stride(0),
            C=channels, BLOCK_C=block, KEEP=keep, num_warps=1, **early_launch(x.device),
        )  # fmt: skip
    return out


@launches(rg_lru, invariant={})
def rg_lru_triton(x, gates, bias, decay, state, batch) -> Tensor:
    chunks, (num_rows, channels) = batch.chunk_table, x.shape
    _check(x, gates, bias, state)
    num_chunks, num_seqs = chunks.seq.shape[0], chunks.first.shape[0] - 1
    out, summaries = x.new_empty(x.shape), x.new_empty(num_chunks, 2, channels, dtype=torch.float32)
    block = min(_BLOCK_C, next_power_of_2(channels))
    blocks = cdiv(channels, block)

    def compute_chunks(out: Tensor | None) -> None:
        _rg_lru_chunk_kernel[(blocks, num_chunks)](
            x, gates, bias, decay, summaries, out,
            chunks.seq, chunks.start, chunks.length, batch.cu_seqlens_q, batch.seq_lens, x.stride(0),
            C=channels, BLOCK_C=block, TOKENS=_TOKENS, num_warps=2, **early_launch(x.device),
        )  # fmt: skip

    compute_chunks(None)
    _rg_lru_walk_kernel[(blocks, chunks.max_seqs)](
        summaries, state, out, *metadata(batch, chunks), num_rows, num_seqs,
        C=channels, BLOCK_C=block, CHUNKS=_CHUNKS, CHUNK=CHUNK_SIZE, num_warps=1, **early_launch(x.device),
    )  # fmt: skip
    compute_chunks(out)
    return out


def _check(x: Tensor, gates: Tensor, bias: Tensor, state: Tensor) -> None:
    assert x.stride(1) == 1, "channels must be dense"
    assert gates.is_contiguous() and bias.is_contiguous() and state.is_contiguous()
