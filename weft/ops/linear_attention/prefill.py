"""Linear attention with one decay per head and token in chunks, for prefill.

Job: ``chunk_linear_attention`` on the GPU, in two launches. Owns: their tile shapes. Does not know: projections,
convolution, norms.

The chunked form (arXiv 2405.21060): inside a chunk, with G the running sum of g and S the state before the chunk::

    P_ij = exp(G_i - G_j) beta_j (q_i . k_j)   for i >= j
    o    = exp(G) q S + P v + skip v
    S'   = exp(G_last) S + k^T (exp(G_last - G) beta v)

The first kernel needs no state and runs for all chunks and heads at once: it writes P below its diagonal and the row
vectors. A token's effect on itself, P's diagonal and the skip, stays in float32. The second walks through the chunks of
each sequence with a slice of the state, ``[K, BLOCK_V]``, in float32 registers. It stores outputs, checkpoints and the
final state in the same pass, and no other state.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 and sequences without chunks leave at once.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import ChunkTable
from weft.ops.backend import launches
from weft.ops.linear_attention import chunk_linear_attention
from weft.ops.triton.chunk_scan import (
    METADATA,
    Tile,
    check_rows,
    expected_rows,
    find_chunks,
    metadata,
    read_state,
    store_checkpoint,
)
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2, precision

_VECTORS = tl.constexpr(4)


class Fixed(NamedTuple):
    """Compile-time parameters of the kernels.

    Attributes:
        num_groups, num_heads, head_k_dim, head_v_dim: G, H, K and V.
        block_k, block_v: of a slice of the state.
        precision: of products of float32 operands.
        stages: of the pipeline.
    """

    num_groups: int
    num_heads: int
    head_k_dim: int
    head_v_dim: int
    block_k: int
    block_v: int
    precision: str
    stages: int


@jit(do_not_specialize_on_alignment=METADATA)
def _prepare_kernel(
    q, k, g, beta, skip, attention, vectors, chunk_start, chunk_length, stride_q, stride_k, stride_g,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one chunk and head: the attention inside the chunk, and the row vectors."""
    enter(EARLY)
    H: tl.constexpr = FIXED.num_heads
    K: tl.constexpr = FIXED.head_k_dim
    GROUP: tl.constexpr = FIXED.num_heads // FIXED.num_groups
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunk_length + i_chunk)
    if length == 0:
        return
    start = tl.load(chunk_start + i_chunk).to(tl.int64)
    o_row, o_k = tl.arange(0, CHUNK), tl.arange(0, FIXED.block_k)
    valid = o_row < length
    rows = start + o_row
    mask = valid[:, None] & (o_k < K)[None, :]
    columns = (i_head // GROUP) * K + o_k
    b_k = tl.load(k + rows[:, None] * stride_k + columns[None, :], mask=mask, other=0.0)
    b_q = tl.load(q + rows[:, None] * stride_q + columns[None, :], mask=mask, other=0.0)
    b_g = tl.load(g + rows * stride_g + i_head, mask=valid, other=0.0)
    decay = tl.cumsum(b_g, 0)
    to_end = tl.cumsum(b_g, 0, reverse=True) - b_g  # summed from the end: exact for the tokens that still count there

    i, j = o_row[:, None], o_row[None, :]
    between = tl.exp(tl.where(i >= j, decay[:, None] - decay[None, :], float("-inf")))
    write = tl.exp(to_end)
    if beta is not None:
        b_beta = tl.load(beta + rows * H + i_head, mask=valid, other=0.0)
        between = between * b_beta[None, :]
        write = write * b_beta
    qk = tl.dot(b_q, tl.trans(b_k), input_precision=FIXED.precision) * between
    own = tl.sum(tl.where(i == j, qk, 0.0), 1)
    if skip is not None:
        own += tl.load(skip + i_head).to(tl.float32)
    tile = (i_chunk * H + i_head).to(tl.int64)
    p_attention = attention + tile * CHUNK * CHUNK + i * CHUNK + j
    tl.store(p_attention, tl.where(i == j, 0.0, qk).to(attention.dtype.element_ty))
    p_vectors = vectors + tile * _VECTORS * CHUNK + o_row
    tl.store(p_vectors, tl.exp(decay))
    tl.store(p_vectors + CHUNK, write)
    tl.store(p_vectors + 2 * CHUNK, own)
    tl.store(p_vectors + 3 * CHUNK, tl.exp(to_end + b_g))


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _scan_kernel(
    q, k, v, out, state, attention, vectors,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_q, stride_k, stride_v,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one sequence, head and slice of V: the chunks in order, the state's columns in registers."""
    enter(EARLY)
    H: tl.constexpr = FIXED.num_heads
    K: tl.constexpr = FIXED.head_k_dim
    V: tl.constexpr = FIXED.head_v_dim
    GROUP: tl.constexpr = FIXED.num_heads // FIXED.num_groups
    BLOCK_V: tl.constexpr = FIXED.block_v
    PRECISION: tl.constexpr = FIXED.precision
    i_v, i_head, i_prefill = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_row, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, FIXED.block_k), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = o_k < K, o_v < V
    i_seq, first, last = find_chunks(
        out, chunk_seq, chunk_start, first_chunk, cu_seqlens_q, num_rows, num_seqs, i_head, i_prefill, o_v, v_mask,
        H, V, CHUNK,
    )  # fmt: skip
    if first == last:
        return
    square = o_row[:, None] * CHUNK + o_row[None, :]
    inside = o_k[:, None] * V + o_v[None, :]
    state_mask = k_mask[:, None] & v_mask[None, :]
    p_state, b_state = read_state(
        state, cu_seqlens_q, seq_lens, state_slots, i_seq, i_head, inside, state_mask, H, K * V
    )  # fmt: skip
    key_columns = (i_head // GROUP) * K + o_k
    value_columns = i_head * V + o_v
    operand = q.dtype.element_ty
    start = tl.load(chunk_start + first).to(tl.int64)
    length = tl.load(chunk_length + first)
    for i_chunk in tl.range(first, last, num_stages=FIXED.stages):
        # The next chunk's length is read one chunk ahead, so that the addresses of its tiles wait for nothing.
        next_length = tl.load(chunk_length + i_chunk + 1, mask=i_chunk + 1 < last, other=0)
        valid = o_row < length
        rows = (start + o_row)[:, None]
        tile = (i_chunk * H + i_head).to(tl.int64)
        mask = valid[:, None] & k_mask[None, :]
        b_k = tl.load(k + rows * stride_k + key_columns[None, :], mask=mask, other=0.0)
        b_q = tl.load(q + rows * stride_q + key_columns[None, :], mask=mask, other=0.0)
        mask = valid[:, None] & v_mask[None, :]
        b_v = tl.load(v + rows * stride_v + value_columns[None, :], mask=mask, other=0.0)
        b_attention = tl.load(attention + tile * CHUNK * CHUNK + square)
        p_vectors = vectors + tile * _VECTORS * CHUNK + o_row
        q_scale, write, own = tl.load(p_vectors), tl.load(p_vectors + CHUNK), tl.load(p_vectors + 2 * CHUNK)
        chunk_decay = tl.load(vectors + tile * _VECTORS * CHUNK + 3 * CHUNK)

        values = b_v.to(tl.float32)
        b_out = tl.dot(b_q, b_state.to(operand), input_precision=PRECISION) * q_scale[:, None]
        b_out = tl.dot(b_attention, b_v, b_out + values * own[:, None], input_precision=PRECISION)
        b_state = b_state * chunk_decay
        b_state = tl.dot(tl.trans(b_k), (values * write[:, None]).to(operand), b_state, input_precision=PRECISION)
        p_out = out + rows * (H * V) + value_columns[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask)

        store_checkpoint(state, checkpoint_slot, i_chunk, i_head, inside, state_mask, b_state, H, K * V)
        start += length
        length = next_length
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=state_mask)


def choose_tile(num_rows: int, head_k_dim: int, head_v_dim: int, dtype: torch.dtype) -> Tile:
    """The scan's tile (measured on an H200; see ``benchmarks/kernels/mamba2.py``).

    Args:
        num_rows: sequences times heads.
        head_k_dim, head_v_dim: K and V.
        dtype: of the operands.
    """
    widest = max(16, next_power_of_2(head_v_dim))
    if dtype == torch.float32:
        return Tile(min(32, widest), 4, 1)
    fits = head_k_dim <= 128  # the tiles of q and k of all stages stand in shared memory
    narrow, wide = num_rows * cdiv(head_v_dim, 32), num_rows * cdiv(head_v_dim, 64)
    if narrow <= MULTIPROCESSORS or (narrow <= 2 * MULTIPROCESSORS and not fits):
        return Tile(min(32, widest), 4, 3 if fits else 2)
    if wide <= MULTIPROCESSORS and fits:  # a program to each multiprocessor again, with half as many reads of q and k
        return Tile(min(64, widest), 4, 3)
    return Tile(min(64, widest), 4, 2 if fits else 1)


@launches(chunk_linear_attention, invariant={})
def chunk_linear_attention_triton(q, k, v, g, beta, skip, state, batch, *, tile: Tile | None = None) -> Tensor:
    """Triton kernels of ``chunk_linear_attention``; float32 inputs are multiplied with float32's accuracy.

    ``tile`` overrides the choice of ``choose_tile`` (tests and measurements).
    """
    chunks = batch.chunk_table
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x)
    assert g.stride(1) == 1 and state.is_contiguous() and (beta is None or beta.is_contiguous())
    out = v.new_empty(v.shape)
    (num_rows, num_heads, head_v_dim), (_, num_groups, head_k_dim) = v.shape, k.shape
    tile = tile or choose_tile(expected_rows(batch, num_heads), head_k_dim, head_v_dim, q.dtype)
    block_k, block_v = max(16, next_power_of_2(head_k_dim)), max(16, tile.block_v)
    fixed = Fixed(
        num_groups, num_heads, head_k_dim, head_v_dim, block_k, block_v, precision(q), tile.stages,
    )  # fmt: skip
    prepared = _prepare(q, k, g, beta, skip, chunks, fixed)
    _scan_kernel[(cdiv(head_v_dim, block_v), num_heads, chunks.max_seqs)](
        q, k, v, out, state, *prepared,
        *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1, q.stride(0), k.stride(0), v.stride(0),
        FIXED=fixed, CHUNK=CHUNK_SIZE, num_warps=tile.warps, num_stages=tile.stages, **early_launch(q.device),
    )  # fmt: skip
    return out


def _prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor | None, skip: Tensor | None, chunks: ChunkTable, fixed: Fixed
) -> tuple[Tensor, Tensor]:
    """``attention [chunks, H, 64, 64]`` in q's dtype and ``vectors [chunks, H, 4, 64]`` float32."""
    num_chunks, num_heads = chunks.start.shape[0], fixed.num_heads
    attention = q.new_empty(num_chunks, num_heads, CHUNK_SIZE, CHUNK_SIZE)
    vectors = torch.empty(num_chunks, num_heads, _VECTORS.value, CHUNK_SIZE, dtype=torch.float32, device=q.device)
    # Parameters that only the other kernel reads must not compile this kernel twice.
    shared = fixed._replace(block_v=0, stages=1)
    _prepare_kernel[(num_chunks, num_heads)](
        q, k, g, beta, skip, attention, vectors, chunks.start, chunks.length, q.stride(0), k.stride(0), g.stride(0),
        FIXED=shared, CHUNK=CHUNK_SIZE, num_warps=4, num_stages=1, **early_launch(q.device),
    )  # fmt: skip
    return attention, vectors
