"""The delta rule's walk through the chunks of each sequence, from what the kernels before it have prepared.

Job: the last launch of ``gdn_prefill.py`` and ``kda_prefill.py``. On Hopper it is the kernel of ``scan_hopper.py``.
A slice of the state, ``[K, BLOCK_V]``, stays in float32 registers; outputs, checkpoints and the final state leave in
the same pass. Does not know: how the chunks' matrices come about.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch
from weft.ops.delta_rule.vectors import PreparedChunks
from weft.ops.triton.chunk_scan import (
    METADATA,
    Tile,
    expected_rows,
    find_chunks,
    metadata,
    read_state,
    store_checkpoint,
)
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2, precision

if GLUON_IS_KNOWN:
    from weft.ops.delta_rule import scan_hopper as hopper

VECTORS = tl.constexpr(8)
"""Vectors of a chunk and head with decays by head. Six are used; the copy engine takes powers of two."""


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        num_k_heads, num_v_heads, head_k_dim, head_v_dim: of the layer, as in ``GatedDeltaNetConfig``.
        block_k, block_v: of a slice of the state.
        precision: of products of float32 operands.
        stages: of the pipeline.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    block_k: int
    block_v: int
    precision: str
    stages: int


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _scan_kernel(
    q, k, v, out, state, keys, solve, attention, vectors,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_q, stride_k, stride_v,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one sequence, value head and slice of V: the chunks in order, the state's columns in registers.

    ``keys``: of ``scan_chunks``; without them keys and queries come as they are, and vectors scale their rows.
    """
    enter(EARLY)
    HV: tl.constexpr = FIXED.num_v_heads
    K: tl.constexpr = FIXED.head_k_dim
    V: tl.constexpr = FIXED.head_v_dim
    BLOCK_V: tl.constexpr = FIXED.block_v
    PRECISION: tl.constexpr = FIXED.precision
    i_v, i_head, i_prefill = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_row, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, FIXED.block_k), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = o_k < K, o_v < V
    i_seq, first, last = find_chunks(
        out, chunk_seq, chunk_start, first_chunk, cu_seqlens_q, num_rows, num_seqs, i_head, i_prefill, o_v, v_mask,
        HV, V, CHUNK,
    )  # fmt: skip
    if first == last:
        return

    square = o_row[:, None] * CHUNK + o_row[None, :]
    inside = o_k[:, None] * V + o_v[None, :]
    state_mask = k_mask[:, None] & v_mask[None, :]
    p_state, b_state = read_state(
        state, cu_seqlens_q, seq_lens, state_slots, i_seq, i_head, inside, state_mask, HV, K * V
    )  # fmt: skip
    key_columns = (i_head // (HV // FIXED.num_k_heads)) * K + o_k
    value_columns = i_head * V + o_v
    of_keys = o_row[:, None] * stride_k + key_columns[None, :]
    of_queries = o_row[:, None] * stride_q + key_columns[None, :]
    values = o_row[:, None] * stride_v + value_columns[None, :]
    outputs = o_row[:, None] * (HV * V) + value_columns[None, :]
    operand = solve.dtype.element_ty
    start = tl.load(chunk_start + first).to(tl.int64)
    length = tl.load(chunk_length + first)
    for i_chunk in tl.range(first, last, num_stages=FIXED.stages):
        # The next chunk's length is read one chunk ahead, so that the addresses of its tiles wait for nothing.
        next_length = tl.load(chunk_length + i_chunk + 1, mask=i_chunk + 1 < last, other=0)
        valid = o_row < length
        tile = (i_chunk * HV + i_head).to(tl.int64)
        if keys is None:
            mask = valid[:, None]
            if FIXED.block_k > K:
                mask = mask & k_mask[None, :]
            b_k = tl.load(k + start * stride_k + of_keys, mask=mask, other=0.0)
            b_q = tl.load(q + start * stride_q + of_queries, mask=mask, other=0.0)
        else:
            p_keys = keys + tile * 3 * CHUNK * K + o_row[:, None] * K + o_k[None, :]
            b_k = tl.load(p_keys, mask=k_mask[None, :], other=0.0)
            b_q = tl.load(p_keys + CHUNK * K, mask=k_mask[None, :], other=0.0)
            b_write = tl.load(p_keys + 2 * CHUNK * K, mask=k_mask[None, :], other=0.0)
        mask = valid[:, None] & v_mask[None, :]
        b_v = tl.load(v + start * stride_v + values, mask=mask, other=0.0)
        b_solve = tl.load(solve + tile * CHUNK * CHUNK + square)
        b_attention = tl.load(attention + tile * CHUNK * CHUNK + square)
        if keys is None:
            p_vectors = vectors + tile * VECTORS * CHUNK + o_row
            k_scale, q_scale, k_to_end = tl.load(p_vectors), tl.load(p_vectors + CHUNK), tl.load(p_vectors + 2 * CHUNK)
            b_beta, own = tl.load(p_vectors + 4 * CHUNK), tl.load(p_vectors + 5 * CHUNK)
            decay = tl.load(vectors + tile * VECTORS * CHUNK + 3 * CHUNK)
        else:
            p_vectors = vectors + tile * (2 * CHUNK + K)
            b_beta, own = tl.load(p_vectors + o_row), tl.load(p_vectors + CHUNK + o_row)
            decay = tl.load(p_vectors + 2 * CHUNK + o_k, mask=k_mask, other=0.0)

        old = b_state.to(operand)
        from_k = tl.dot(b_k, old, input_precision=PRECISION)
        if keys is None:
            from_k = from_k * k_scale[:, None]
        right = (b_v - from_k) * b_beta[:, None]
        b_out = tl.dot(b_q, old, input_precision=PRECISION)
        if keys is None:
            b_out = b_out * q_scale[:, None]
        delta = tl.dot(b_solve, right.to(operand), right, input_precision=PRECISION)
        if keys is None:
            b_state = b_state * decay
            b_state = tl.dot(tl.trans(b_k), (delta * k_to_end[:, None]).to(operand), b_state, input_precision=PRECISION)
        else:
            b_state = b_state * decay[:, None]
            b_state = tl.dot(tl.trans(b_write), delta.to(operand), b_state, input_precision=PRECISION)
        b_out = tl.dot(b_attention, delta.to(operand), b_out + delta * own[:, None], input_precision=PRECISION)
        tl.store(out + start * (HV * V) + outputs, b_out.to(out.dtype.element_ty), mask=mask)

        store_checkpoint(state, checkpoint_slot, i_chunk, i_head, inside, state_mask, b_state, HV, K * V)
        start += length
        length = next_length
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=state_mask)


def _choose_tile(num_rows: int, head_v_dim: int, dtype: torch.dtype) -> Tile:
    """Measured on H200; see ``benchmarks/kernels/gdn.py``.

    Args:
        num_rows: sequences times value heads.
        head_v_dim: V.
        dtype: of the operands.
    """
    widest = max(16, next_power_of_2(head_v_dim))
    if dtype == torch.float32:
        return Tile(min(32, widest), 4, 1)
    if num_rows * cdiv(head_v_dim, 32) <= MULTIPROCESSORS:
        return Tile(min(32, widest), 4, 3)
    return Tile(min(64, widest), 4, 3 if num_rows * cdiv(head_v_dim, 64) <= 2 * MULTIPROCESSORS else 1)


def scan_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    state: Tensor,
    prepared: PreparedChunks,
    batch: Batch,
    *,
    tile: Tile | None = None,
) -> None:
    """Outputs and states of all sequences that have chunks.

    Args:
        q, k: ``[T, HK, K]``; not read if the prepared chunks have ``keys``.
        v, out: ``[T, HV, V]``, ``out`` contiguous.
        state: ``[slots, HV, K, V]``.
        tile: overrides the choice of kernel and tile (tests and measurements).
    """
    chunks, (num_rows, num_heads, head_v_dim) = batch.chunk_table, v.shape
    if tile is None and GLUON_IS_KNOWN and hopper.takes(q, k, v):
        lines = prepared.vectors.view(*prepared.vectors.shape[:2], -1, CHUNK_SIZE)
        hopper.launch_delta_scan(q, k, v, out, state, prepared._replace(vectors=lines), batch)
        return
    if tile is None:
        tile = _choose_tile(expected_rows(batch, num_heads), head_v_dim, q.dtype)
        if prepared.keys is not None:  # a third stage of the three forms of keys would not fit
            tile = tile._replace(stages=min(tile.stages, 2))
    block_v = max(16, tile.block_v)
    fixed = Fixed(
        k.shape[1], num_heads, k.shape[2], head_v_dim, max(16, next_power_of_2(k.shape[2])), block_v,
        precision(q), tile.stages,
    )  # fmt: skip
    _scan_kernel[(cdiv(head_v_dim, block_v), num_heads, chunks.max_seqs)](
        q, k, v, out, state, prepared.keys, prepared.solve, prepared.attention, prepared.vectors,
        *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1, q.stride(0), k.stride(0), v.stride(0),
        FIXED=fixed, CHUNK=CHUNK_SIZE, num_warps=tile.warps, num_stages=tile.stages, **early_launch(q.device),
    )  # fmt: skip
