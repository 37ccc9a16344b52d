"""Shared parts of programs that walk through the chunks of a sequence: their tile, the range of chunks, and the state
before the first chunk."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch, ChunkTable


class Tile(NamedTuple):
    """Columns of the state per program, warps, pipeline stages."""

    block_v: int
    warps: int
    stages: int


METADATA = [
    "chunk_seq", "chunk_start", "chunk_length", "checkpoint_slot", "first_chunk", "cu_seqlens_q", "seq_lens",
    "state_slots",
]  # fmt: skip
"""Pointers into the step's packed metadata: their alignment changes from step to step and must not compile a new
kernel."""


def metadata(batch: Batch, chunks: ChunkTable) -> tuple[Tensor, ...]:
    """Return the metadata of a step that kernels over chunks read, in the order of ``METADATA``."""
    of_chunks = (chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first)
    return (*of_chunks, batch.cu_seqlens_q, batch.seq_lens, batch.state_slots)


def expected_rows(batch: Batch, num_heads: int) -> int:
    """Sequences times heads that a tile is chosen for. A captured graph does not know how many sequences there will be;
    short latency is for the case of one."""
    return num_heads * (1 if batch.mixed is not None else batch.chunk_table.max_seqs)


@triton.jit
def _zero_rows(out, begin, end, i_head, o_v, v_mask, HV: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr):
    """Zero some columns of one head of the rows ``begin`` to ``end`` of ``out [T, HV, V]``."""
    o_row = tl.arange(0, CHUNK)
    for row in range(begin, end, CHUNK):
        rows = (row + o_row).to(tl.int64)
        p_out = out + (rows[:, None] * HV + i_head) * V + o_v[None, :]
        zeros = tl.zeros([CHUNK, o_v.shape[0]], out.dtype.element_ty)
        tl.store(p_out, zeros, mask=(rows < end)[:, None] & v_mask[None, :])


@triton.jit
def find_chunks(
    out, chunk_seq, chunk_start, first_chunk, cu_seqlens_q, num_rows, num_seqs, i_head, i_prefill, o_v, v_mask,
    H: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the ``i_prefill``-th sequence with chunks, and its range of chunks, which is empty beyond the last such
    sequence. The first of these programs zeroes the rows of ``out [num_rows, H, V]`` before the first such sequence,
    and rows of padding."""
    num_chunks = tl.load(first_chunk + num_seqs)
    if i_prefill == 0:
        num_tokens = tl.load(cu_seqlens_q + num_seqs)
        _zero_rows(out, num_tokens, num_rows, i_head, o_v, v_mask, H, V, CHUNK)
        begin = num_tokens
        if num_chunks > 0:
            begin = tl.load(chunk_start)
        _zero_rows(out, 0, begin, i_head, o_v, v_mask, H, V, CHUNK)
    i_seq = tl.load(chunk_seq, mask=num_chunks > 0, other=0) + i_prefill  # decodes stand before the first one
    is_there = (num_chunks > 0) & (i_seq < num_seqs)
    first = tl.load(first_chunk + i_seq, mask=is_there, other=0)
    last = tl.load(first_chunk + i_seq + 1, mask=is_there, other=0)
    return i_seq, first, last


@triton.jit
def read_state(
    state, cu_seqlens_q, seq_lens, state_slots, i_seq, i_head, inside, mask, H: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return pointers to one head of the sequence's state, of ``SIZE`` numbers, and the state in float32: zeros for a
    sequence that begins in this step."""
    slot = tl.load(state_slots + i_seq).to(tl.int64)
    query_len = tl.load(cu_seqlens_q + i_seq + 1) - tl.load(cu_seqlens_q + i_seq)
    continues = tl.load(seq_lens + i_seq) != query_len
    p_state = state + (slot * H + i_head) * SIZE + inside
    return p_state, tl.load(p_state, mask=mask & continues, other=0.0).to(tl.float32)


@triton.jit
def store_checkpoint(
    state, checkpoint_slot, i_chunk, i_head, inside, mask, b_state, H: tl.constexpr, SIZE: tl.constexpr
):
    """Store one head of the state after a chunk into the slot that the chunk table asks for, if any."""
    slot = tl.load(checkpoint_slot + i_chunk).to(tl.int64)
    if slot >= 0:
        tl.store(state + (slot * H + i_head) * SIZE + inside, b_state.to(state.dtype.element_ty), mask=mask)


def check_rows(name: str, x: Tensor) -> None:
    """Tokens may be strided (a slice of a wider projection); heads and their dimensions must be dense."""
    assert x.stride(2) == 1 and x.stride(1) == x.shape[2], f"{name}: heads must be dense, got strides {x.stride()}"
