"""The short causal convolution of prefill sequences, and the double-gated one of LFM2.

Job: ``causal_conv1d`` and ``short_conv`` on the GPU, one launch each. Owns: who reads and who writes a state. Does not
know: what the channels mean.

There are two kinds of programs, each for a block of channels. Those of a *piece* (a few tokens of one chunk of the
chunk table) convolve the tokens whose whole window lies in this step, and store the checkpoints that do. A window
slides over the rows: each is read and converted once. Programs of a *sequence* do all work that depends on the old
state: the first ``W - 1`` tokens with their checkpoints, and the final state, which replaces the old one. Therefore no
two programs race for a state.

Graph-safe: grids depend on padded sizes alone; pieces past their chunk's end and sequences without chunks leave at
once, and the pieces share out the rows that belong to no sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch
from weft.ops.backend import launches
from weft.ops.convolution import causal_conv1d, short_conv
from weft.ops.triton.chunk_scan import METADATA, metadata
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.tile_table import choose_tile


class Tile(NamedTuple):
    """A piece: channels and tokens of a program, tokens read at a time, warps, and a limit on registers per thread."""

    channels: int
    tokens: int
    step: int
    warps: int
    max_registers: int | None


# By number of tokens in chunks (padding included), see benchmarks/kernels/rows.py. Eight channels of two bytes are one
# load per thread. Few tokens: short pieces, for more programs. Many: long pieces, which read fewer rows twice. With 128
# registers four programs share a multiprocessor, so that 1,024 channels of 8,192 tokens are two full rounds.
TILES = {
    4096: Tile(512, 16, 4, 4, None),
    1 << 30: Tile(1024, 64, 4, 4, 128),
}
# Three loads for each input, so shorter pieces, on which more programs wait for memory.
GATED_TILES = {
    1024: Tile(512, 4, 4, 4, None),
    1 << 30: Tile(512, 8, 4, 4, None),
}


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        channels, history: of the convolution: inputs that a state holds.
        block_c, tokens, step: see ``Tile``.
        chunk: longest chunk of the chunk table.
        has_bias: whether there is a bias.
        silu: whether SiLU follows.
        gated: the rows are ``b | c | x``, and the result is ``c * conv(b * x)``, rounded as a chain of operations in
            the model's dtype would.
    """

    channels: int
    history: int
    block_c: int
    tokens: int
    step: int
    chunk: int
    has_bias: bool
    silu: bool
    gated: bool


@triton.jit
def _taps(weight, channels, mask, W: tl.constexpr):
    """The filters of some channels: ``W`` vectors, float32."""
    taps = ()
    for j in tl.static_range(W):
        tap = tl.load(weight + channels * W + j, mask=mask, other=0.0).to(tl.float32)
        taps = taps + (tap,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    return taps


@triton.jit
def _input(x, token, stride_x, channels, mask, FIXED: tl.constexpr):
    """The input of the convolution at one token; zero outside the mask."""
    p_row = x + token * stride_x + channels
    row = tl.load(p_row, mask=mask, other=0.0)
    if FIXED.gated:
        row = row * tl.load(p_row + 2 * FIXED.channels, mask=mask, other=0.0)
    return row


@triton.jit
def _rows(rows, x, token, COUNT: tl.constexpr, begin, end, channels, mask, stride_x, FIXED: tl.constexpr):
    """``rows`` and the inputs of ``COUNT`` tokens from ``token`` on; zero outside ``[begin, end)``."""
    for i in tl.static_range(COUNT):
        inside = (token + i >= begin) & (token + i < end)
        row = _input(x, token + i, stride_x, channels, mask & inside, FIXED)
        rows = rows + (row,)  # noqa: RUF005 (kernels cannot unpack)
    return rows


@triton.jit
def _convolve(rows, taps, bias, out, token, low, high, channels, mask, x, stride_x, FIXED: tl.constexpr):
    """Outputs of the tokens from ``token`` on that lie in ``[low, high)``. ``x`` has their gates.

    ``rows``: their inputs after those of the ``history`` tokens before, a tuple of vectors over channels.
    """
    HISTORY: tl.constexpr = FIXED.history
    offset = tl.zeros([channels.shape[0]], tl.float32)
    if FIXED.has_bias:
        offset = tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(len(rows) - HISTORY):
        total = rows[i].to(tl.float32) * taps[0]
        for j in tl.static_range(1, HISTORY + 1):
            total = tl.fma(rows[i + j].to(tl.float32), taps[j], total)
        if FIXED.has_bias:
            total += offset
        if FIXED.silu:
            total *= sigmoid(total)
        inside = (token + i >= low) & (token + i < high)
        result = total.to(out.dtype.element_ty)
        if FIXED.gated:
            p_gate = x + (token + i) * stride_x + FIXED.channels + channels
            result = result * tl.load(p_gate, mask=mask & inside, other=0.0)
        tl.store(out + (token + i) * FIXED.channels + channels, result, mask=mask & inside)


@triton.jit
def _store_state(
    x, conv_state, p_state, slot, end, begin, continues, channels, mask, stride_x,
    FIXED: tl.constexpr, MAY_PRECEDE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Write the state after token ``end - 1`` into ``slot``; without ``MAY_PRECEDE`` it lies in this step's inputs.

    ``p_state``: the sequence's old state ``[channels, history]``, where the inputs of tokens before ``begin`` stand.
    """
    HISTORY: tl.constexpr = FIXED.history
    values = ()
    for j in tl.static_range(HISTORY):
        token = end - HISTORY + j
        value = _input(x, token, stride_x, channels, mask & (token >= begin), FIXED).to(tl.float32)
        if MAY_PRECEDE:
            before = p_state + channels * HISTORY + (token - begin + HISTORY)
            value += tl.load(before, mask=mask & (token < begin) & continues, other=0.0).to(tl.float32)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    if IN_PLACE:
        tl.debug_barrier()  # every thread has loaded what another one overwrites
    for j in tl.static_range(HISTORY):
        target = conv_state + (slot * FIXED.channels + channels) * HISTORY + j
        tl.store(target, values[j].to(conv_state.dtype.element_ty), mask=mask)


@triton.jit
def _begin_sequence(
    tensors, chunks, sequences, i_prefill, num_seqs, channels, mask, stride_x, FIXED: tl.constexpr
):  # fmt: skip
    """Compute the first tokens of one sequence, which depend on the old state, and store the final state."""
    x, weight, bias, out, conv_state = tensors
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk = chunks
    cu_seqlens_q, seq_lens, state_slots = sequences
    HISTORY: tl.constexpr = FIXED.history
    if tl.load(first_chunk + num_seqs) == 0:
        return
    seq = tl.load(chunk_seq) + i_prefill  # decodes stand before the first sequence that has chunks
    if seq >= num_seqs:
        return
    first, last = tl.load(first_chunk + seq), tl.load(first_chunk + seq + 1)
    if first == last:
        return
    begin, end = tl.load(cu_seqlens_q + seq).to(tl.int64), tl.load(cu_seqlens_q + seq + 1).to(tl.int64)
    continues = tl.load(seq_lens + seq) != end - begin
    slot = tl.load(state_slots + seq).to(tl.int64)
    p_state = conv_state + slot * FIXED.channels * HISTORY
    rows = ()
    for j in tl.static_range(HISTORY):
        old = tl.load(p_state + channels * HISTORY + j, mask=mask & continues, other=0.0).to(tl.float32)
        rows = rows + (old,)  # type: ignore[assignment]  # noqa: RUF005
    rows = _rows(rows, x, begin, HISTORY, begin, end, channels, mask, stride_x, FIXED)
    taps = _taps(weight, channels, mask, HISTORY + 1)
    _convolve(rows, taps, bias, out, begin, begin, end, channels, mask, x, stride_x, FIXED)
    if tl.load(chunk_length + first) < HISTORY:
        for i in range(first, tl.minimum(first + HISTORY, last)):  # no other chunk can end so early
            copy_slot = tl.load(checkpoint_slot + i).to(tl.int64)
            stop = tl.load(chunk_start + i).to(tl.int64) + tl.load(chunk_length + i)
            if (copy_slot >= 0) & (stop - begin < HISTORY):
                _store_state(
                    x, conv_state, p_state, copy_slot, stop, begin, continues, channels, mask, stride_x,
                    FIXED, True, False,
                )  # fmt: skip
    tl.debug_barrier()
    _store_state(
        x, conv_state, p_state, slot, end, begin, continues, channels, mask, stride_x, FIXED, True, True
    )  # fmt: skip


@triton.jit
def _zero_rows(out, begin, end, i_share, num_shares, channels, mask, C: tl.constexpr):
    """Zero a program's share of the rows ``begin`` to ``end`` (int64)."""
    for row in range(begin + i_share, end, num_shares):
        zeros = tl.zeros([channels.shape[0]], out.dtype.element_ty)
        tl.store(out + row * C + channels, zeros, mask=mask)


@jit(do_not_specialize=["num_rows", "num_seqs", "max_seqs"], do_not_specialize_on_alignment=METADATA)
def _conv_kernel(
    x, weight, bias, out, conv_state,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, max_seqs, stride_x,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of channels of one sequence's beginning (the first ``max_seqs`` programs) or of one piece."""
    enter(EARLY)
    C: tl.constexpr = FIXED.channels
    HISTORY: tl.constexpr = FIXED.history
    TOKENS: tl.constexpr = FIXED.tokens
    STEP: tl.constexpr = FIXED.step
    SHARES: tl.constexpr = FIXED.chunk // FIXED.tokens
    channels = tl.program_id(0) * FIXED.block_c + tl.arange(0, FIXED.block_c)
    mask = channels < C
    if tl.program_id(1) < max_seqs:
        tensors = (x, weight, bias, out, conv_state)
        chunks = (chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk)
        sequences = (cu_seqlens_q, seq_lens, state_slots)
        _begin_sequence(
            tensors, chunks, sequences, tl.program_id(1), num_seqs, channels, mask, stride_x, FIXED
        )  # fmt: skip
        return
    i_piece = tl.program_id(1) - max_seqs
    i_chunk, skipped = i_piece // SHARES, i_piece % SHARES * TOKENS
    length = tl.load(chunk_length + i_chunk)
    seq = tl.load(chunk_seq + i_chunk)
    chunk_begin = tl.load(chunk_start + i_chunk)
    num_tokens = tl.load(cu_seqlens_q + num_seqs).to(tl.int64)
    num_decodes = tl.where(tl.load(first_chunk + num_seqs) > 0, tl.load(chunk_start), num_tokens)
    num_pieces = tl.num_programs(1) - max_seqs
    _zero_rows(out, num_tokens, num_rows, i_piece, num_pieces, channels, mask, C)
    _zero_rows(out, num_tokens - num_tokens, num_decodes, i_piece, num_pieces, channels, mask, C)
    if skipped >= length:
        return
    begin = tl.load(cu_seqlens_q + seq).to(tl.int64)
    copy_slot = tl.load(checkpoint_slot + i_chunk).to(tl.int64)
    start, stop = (chunk_begin + skipped).to(tl.int64), (chunk_begin + length).to(tl.int64)
    taps = _taps(weight, channels, mask, HISTORY + 1)
    low, high = begin + HISTORY, tl.minimum(start + TOKENS, stop)
    rows = _rows((), x, start - HISTORY, HISTORY + STEP, begin, high, channels, mask, stride_x, FIXED)
    for token in range(start, high, STEP):
        # The next rows are under way while these are convolved.
        ahead = ()
        for j in tl.static_range(HISTORY):
            ahead = ahead + (rows[STEP + j],)  # type: ignore[assignment]  # noqa: RUF005
        ahead = _rows(ahead, x, token + STEP, STEP, begin, high, channels, mask, stride_x, FIXED)
        _convolve(rows, taps, bias, out, token, low, high, channels, mask, x, stride_x, FIXED)
        rows = ahead
    if (copy_slot >= 0) & (stop == high) & (stop >= low):
        _store_state(
            x, conv_state, conv_state, copy_slot, stop, begin, False, channels, mask, stride_x, FIXED, False, False
        )  # fmt: skip


@launches(causal_conv1d, invariant={})
def causal_conv1d_triton(x, weight, bias, conv_state, batch, *, silu, tile: Tile | None = None) -> Tensor:
    """Triton kernel of ``causal_conv1d``. The chunk table says which tokens form which sequence.

    ``tile`` overrides the choice by ``TILES`` (tests and measurements).
    """
    return _launch(x, weight, bias, conv_state, batch, silu=silu, tile=tile)


@launches(short_conv, invariant={})
def short_conv_triton(projected, weight, bias, conv_state, batch) -> Tensor:
    return _launch(projected, weight, bias, conv_state, batch, gated=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, batch: Batch,
    *, silu: bool = False, gated: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    chunks, num_rows, (num_channels, kernel) = batch.chunk_table, x.shape[0], weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and conv_state.is_contiguous()
    num_chunks = chunks.start.shape[0]
    tile = tile or choose_tile(GATED_TILES if gated else TILES, num_chunks * CHUNK_SIZE)
    block, tokens = min(tile.channels, next_power_of_2(num_channels)), min(tile.tokens, CHUNK_SIZE)
    out = x.new_empty(num_rows, num_channels)
    _conv_kernel[(cdiv(num_channels, block), chunks.max_seqs + num_chunks * (CHUNK_SIZE // tokens))](
        x, weight, bias, out, conv_state,
        *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1, chunks.max_seqs, x.stride(0),
        FIXED=Fixed(num_channels, kernel - 1, block, tokens, tile.step, CHUNK_SIZE, bias is not None, silu, gated),
        num_warps=tile.warps, maxnreg=tile.max_registers, **early_launch(x.device),
    )  # fmt: skip
    return out
