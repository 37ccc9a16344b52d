"""Kimi Delta Attention in chunks, for prefill: the gated delta rule with a decay per channel of the key.

Job: ``kda_gates`` and ``chunk_gated_delta_rule`` with ``g [T, H, K]`` on the GPU. Owns: the split into two launches and
their tile shapes. Does not know: projections, convolution, norms.

As in ``gated_delta_rule.py``, but decays do not factor out of the products over channels. Inside a chunk, with G the
running sum of g and S the state before the chunk::

    A_ij  = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for i > j    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)   for i >= j
    delta = (I + A)^-1 beta (v - (exp(G) k) S)
    o     = (exp(G) q) S + P delta
    S'    = exp(G_last) S + (exp(G_last - G) k)^T delta

Rows are taken in blocks of 16. Against columns before its block, a row's factor is split at the block's first row:
``exp(G_i - G_first) exp(G_first - G_j)``, of which neither exceeds 1, and the sum over channels is a matrix product.
Inside the block the exponentials are formed one column at a time. Keys and queries with their decays are written once,
for the scan. Blocks read what the program wrote before: it comes from the nearest cache.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 and sequences without chunks leave at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.config.gated_delta_net import CHUNK_SIZE
from weft.forward_context import Batch
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import sigmoid, softplus
from weft.ops.triton.gated_delta_rule import Tile, _check_rows, _precision, _zero_rows, choose_tile
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_L2_EPS = tl.constexpr(1e-6)
_BLOCK = tl.constexpr(16)

_METADATA = [
    "chunk_seq", "chunk_start", "chunk_length", "checkpoint_slot", "first_chunk", "cu_seqlens_q", "seq_lens",
    "state_slots",
]  # fmt: skip


@jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    f, b, A_log, dt_bias, g, beta, num_tokens, stride_f, stride_b,
    H: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens, one head."""
    enter(EARLY)
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = head * K + tl.arange(0, BLOCK_K)
    inside = (tokens < num_tokens)[:, None] & (tl.arange(0, BLOCK_K) < K)[None, :]
    x = tl.load(f + tokens[:, None] * stride_f + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + columns, mask=tl.arange(0, BLOCK_K) < K, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    tl.store(g + tokens[:, None] * (H * K) + columns[None, :], -rate * softplus(x), mask=inside)
    y = tl.load(b + tokens * stride_b + head, mask=tokens < num_tokens, other=0.0).to(tl.float32)
    tl.store(beta + tokens * H + head, sigmoid(y), mask=tokens < num_tokens)


def kda_gates_triton(f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Triton kernel of ``kda_gates``."""
    assert f.stride(1) == b.stride(1) == 1 and A_log.is_contiguous() and dt_bias.is_contiguous()
    num_tokens, heads = f.shape[0], A_log.shape[0]
    dim = f.shape[1] // heads
    g = torch.empty(num_tokens, heads, dim, dtype=torch.float32, device=f.device)
    beta = torch.empty(num_tokens, heads, dtype=torch.float32, device=f.device)
    if num_tokens:
        _gates_kernel[(cdiv(num_tokens, 16), heads)](
            f, b, A_log, dt_bias, g, beta, num_tokens, f.stride(0), b.stride(0),
            H=heads, K=dim, TOKENS=16, BLOCK_K=next_power_of_2(dim), num_warps=4, **early_launch(f.device),
        )  # fmt: skip
    return g, beta


class Fixed(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
        num_heads, head_k_dim, head_v_dim: of the layer.
        block_k, block_v: of a slice of the state.
        zero_decodes: write zeros to the rows before the first sequence that has chunks.
        precision: of products of float32 operands.
        stages: of the scan's pipeline.
    """

    num_heads: int
    head_k_dim: int
    head_v_dim: int
    block_k: int
    block_v: int
    zero_decodes: bool
    precision: str
    stages: int


@jit(do_not_specialize_on_alignment=_METADATA)
def _prepare_kernel(
    q, k, g, beta, keys, system, solve, attention, own, sums, decays, chunk_start, chunk_length, stride_q, stride_k,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, INVERSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One chunk and head: the solve matrix, the attention inside the chunk, and keys and queries with their decays."""
    enter(EARLY)
    H: tl.constexpr = FIXED.num_heads
    K: tl.constexpr = FIXED.head_k_dim
    BLOCK_K: tl.constexpr = FIXED.block_k
    PRECISION: tl.constexpr = FIXED.precision
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunk_length + i_chunk)
    if length == 0:
        return
    start = tl.load(chunk_start + i_chunk).to(tl.int64)
    tile = (i_chunk * H + i_head).to(tl.int64)
    o_row, o_k, o_block = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, _BLOCK)
    k_mask = o_k < K
    valid = o_row < length
    mask = valid[:, None] & k_mask[None, :]
    columns = i_head * K + o_k
    rows = (start + o_row)[:, None]
    b_k = tl.load(k + rows * stride_k + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    b_q = tl.load(q + rows * stride_q + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    b_g = tl.load(g + rows * (H * K) + columns[None, :], mask=mask, other=0.0)
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, 1) + _L2_EPS)[:, None]
    b_q *= (tl.rsqrt(tl.sum(b_q * b_q, 1) + _L2_EPS) * (K**-0.5))[:, None]
    b_sum = tl.cumsum(b_g, 0)
    to_end = tl.cumsum(b_g, 0, reverse=True) - b_g
    inside = o_row[:, None] * K + o_k[None, :]
    p_keys = keys + tile * 3 * CHUNK * K + inside
    dtype = keys.dtype.element_ty
    tl.store(p_keys, (b_k * tl.exp(b_sum)).to(dtype), mask=k_mask[None, :])
    tl.store(p_keys + CHUNK * K, (b_q * tl.exp(b_sum)).to(dtype), mask=k_mask[None, :])
    tl.store(p_keys + 2 * CHUNK * K, (b_k * tl.exp(to_end)).to(dtype), mask=k_mask[None, :])
    tl.store(decays + tile * K + o_k, tl.exp(tl.sum(b_g, 0)), mask=k_mask)
    # Normalised keys, queries and sums in float32, to be read by blocks of rows.
    p_sums = sums + tile * 3 * CHUNK * K
    tl.store(p_sums + inside, b_k, mask=k_mask[None, :])
    tl.store(p_sums + CHUNK * K + inside, b_q, mask=k_mask[None, :])
    tl.store(p_sums + 2 * CHUNK * K + inside, b_sum, mask=k_mask[None, :])
    tl.debug_barrier()

    square = tile * CHUNK * CHUNK
    for start_row in range(0, CHUNK, _BLOCK):
        i = start_row + o_block
        at = i[:, None] * K + o_k[None, :]
        i_k = tl.load(p_sums + at, mask=k_mask[None, :], other=0.0)
        i_q = tl.load(p_sums + CHUNK * K + at, mask=k_mask[None, :], other=0.0)
        i_sum = tl.load(p_sums + 2 * CHUNK * K + at, mask=k_mask[None, :], other=0.0)
        first_sum = tl.load(p_sums + 2 * CHUNK * K + start_row * K + o_k, mask=k_mask, other=0.0)
        since = tl.exp(i_sum - first_sum[None, :])
        before = tl.where((o_row < start_row)[:, None], first_sum[None, :] - b_sum, float("-inf"))
        earlier = tl.trans(b_k * tl.exp(before))
        kk = tl.dot(i_k * since, earlier, input_precision=PRECISION)
        qk = tl.dot(i_q * since, earlier, input_precision=PRECISION)
        for column in tl.static_range(_BLOCK):
            j = start_row + column
            j_k = tl.load(p_sums + j * K + o_k, mask=k_mask, other=0.0)
            j_sum = tl.load(p_sums + 2 * CHUNK * K + j * K + o_k, mask=k_mask, other=0.0)
            factor = tl.exp(tl.where((i >= j)[:, None], i_sum - j_sum[None, :], float("-inf"))) * j_k[None, :]
            is_column = (o_row == j)[None, :]
            kk = tl.where(is_column, tl.sum(i_k * factor, 1)[:, None], kk)
            qk = tl.where(is_column, tl.sum(i_q * factor, 1)[:, None], qk)
        b_beta = tl.load(beta + (start + i) * H + i_head, mask=i < length, other=0.0)
        is_own = i[:, None] == o_row[None, :]
        to = square + i[:, None] * CHUNK + o_row[None, :]
        tl.store(system + to, tl.where(i[:, None] > o_row[None, :], kk * b_beta[:, None], 0.0))
        tl.store(attention + to, tl.where(is_own, 0.0, qk).to(attention.dtype.element_ty))
        tl.store(own + tile * CHUNK + i, tl.sum(tl.where(is_own, qk, 0.0), 1))
    tl.debug_barrier()

    i, j = o_row[:, None], o_row[None, :]
    b_system = tl.load(system + square + i * CHUNK + j)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, b_system, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), b_system, 0.0)
        operand = inverse.to(INVERSE)
        product = tl.dot(operand, below.to(INVERSE), input_precision=PRECISION)
        inverse -= tl.dot(product.to(INVERSE), operand, input_precision=PRECISION)
    tl.store(solve + square + i * CHUNK + j, tl.where(i == j, 0.0, inverse).to(solve.dtype.element_ty))


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=_METADATA)
def _scan_kernel(
    v, beta, out, state, keys, solve, attention, own, decays,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_v,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One sequence, head and slice of V: the chunks in order, the state's columns in registers."""
    enter(EARLY)
    H: tl.constexpr = FIXED.num_heads
    K: tl.constexpr = FIXED.head_k_dim
    V: tl.constexpr = FIXED.head_v_dim
    BLOCK_V: tl.constexpr = FIXED.block_v
    PRECISION: tl.constexpr = FIXED.precision
    i_v, i_head, i_prefill = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_row, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, FIXED.block_k), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = o_k < K, o_v < V
    num_chunks = tl.load(first_chunk + num_seqs)
    if i_prefill == 0:
        num_tokens = tl.load(cu_seqlens_q + num_seqs)
        _zero_rows(out, num_tokens, num_rows, i_head, o_v, v_mask, H, V, CHUNK)
        if FIXED.zero_decodes:
            begin = num_tokens
            if num_chunks > 0:
                begin = tl.load(chunk_start)
            _zero_rows(out, 0, begin, i_head, o_v, v_mask, H, V, CHUNK)
    if num_chunks == 0:
        return
    i_seq = tl.load(chunk_seq) + i_prefill  # decodes stand before the first sequence that has chunks
    if i_seq >= num_seqs:
        return
    first, last = tl.load(first_chunk + i_seq), tl.load(first_chunk + i_seq + 1)
    if first == last:
        return

    square = o_row[:, None] * CHUNK + o_row[None, :]
    inside = o_k[:, None] * V + o_v[None, :]
    state_mask = k_mask[:, None] & v_mask[None, :]
    slot = tl.load(state_slots + i_seq).to(tl.int64)
    query_len = tl.load(cu_seqlens_q + i_seq + 1) - tl.load(cu_seqlens_q + i_seq)
    continues = tl.load(seq_lens + i_seq) != query_len
    p_state = state + (slot * H + i_head) * K * V + inside
    b_state = tl.load(p_state, mask=state_mask & continues, other=0.0).to(tl.float32)
    value_columns = i_head * V + o_v
    operand = keys.dtype.element_ty
    start = tl.load(chunk_start + first).to(tl.int64)
    length = tl.load(chunk_length + first)
    for i_chunk in tl.range(first, last, num_stages=FIXED.stages):
        # The next chunk's length is read one chunk ahead, so that the addresses of its tiles wait for nothing.
        next_length = tl.load(chunk_length + i_chunk + 1, mask=i_chunk + 1 < last, other=0)
        valid = o_row < length
        rows = start + o_row
        tile = (i_chunk * H + i_head).to(tl.int64)
        p_keys = keys + tile * 3 * CHUNK * K + o_row[:, None] * K + o_k[None, :]
        b_k = tl.load(p_keys, mask=k_mask[None, :], other=0.0)
        b_q = tl.load(p_keys + CHUNK * K, mask=k_mask[None, :], other=0.0)
        k_to_end = tl.load(p_keys + 2 * CHUNK * K, mask=k_mask[None, :], other=0.0)
        mask = valid[:, None] & v_mask[None, :]
        b_v = tl.load(v + rows[:, None] * stride_v + value_columns[None, :], mask=mask, other=0.0)
        b_beta = tl.load(beta + rows * H + i_head, mask=valid, other=0.0)
        b_solve = tl.load(solve + tile * CHUNK * CHUNK + square)
        b_attention = tl.load(attention + tile * CHUNK * CHUNK + square)
        b_own = tl.load(own + tile * CHUNK + o_row)
        decay = tl.load(decays + tile * K + o_k, mask=k_mask, other=0.0)

        old = b_state.to(operand)
        right = (b_v - tl.dot(b_k, old, input_precision=PRECISION)) * b_beta[:, None]
        b_out = tl.dot(b_q, old, input_precision=PRECISION)
        delta = tl.dot(b_solve, right.to(operand), right, input_precision=PRECISION)
        b_state = b_state * decay[:, None]
        b_state = tl.dot(tl.trans(k_to_end), delta.to(operand), b_state, input_precision=PRECISION)
        b_out = tl.dot(b_attention, delta.to(operand), b_out + delta * b_own[:, None], input_precision=PRECISION)
        p_out = out + rows[:, None] * (H * V) + value_columns[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask)

        copy_slot = tl.load(checkpoint_slot + i_chunk).to(tl.int64)
        if copy_slot >= 0:
            p_copy = state + (copy_slot * H + i_head) * K * V + inside
            tl.store(p_copy, b_state.to(state.dtype.element_ty), mask=state_mask)
        start += length
        length = next_length
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=state_mask)


def _choose_tile(num_rows: int, head_v_dim: int, dtype: torch.dtype) -> Tile:
    """That of the rule with one decay per head; a third stage of the three forms of keys would not fit."""
    tile = choose_tile(num_rows, head_v_dim, dtype)
    return tile._replace(stages=min(tile.stages, 2))


def chunk_kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    batch: Batch,
    *,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Triton kernels of ``chunk_gated_delta_rule`` with ``g [T, H, K]``; float32 inputs keep float32 accuracy.

    ``tile`` overrides the choice of ``choose_tile`` (tests and measurements).
    """
    chunks = batch.chunks[CHUNK_SIZE]
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x)
    assert g.is_contiguous() and beta.is_contiguous() and state.is_contiguous() and k.shape[1] == v.shape[1]
    zero_decodes, out = out is None, v.new_empty(v.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    (num_rows, heads, head_v_dim), head_dim, num_chunks = v.shape, k.shape[2], chunks.start.shape[0]
    num_seqs = 1 if batch.mixture is not None else chunks.max_seqs
    tile = tile or _choose_tile(num_seqs * heads, head_v_dim, q.dtype)
    block_v = max(16, tile.block_v)
    fixed = Fixed(
        heads, head_dim, head_v_dim, max(16, next_power_of_2(head_dim)), block_v, zero_decodes, _precision(q.dtype),
        tile.stages,
    )  # fmt: skip
    keys = q.new_empty(num_chunks, heads, 3, CHUNK_SIZE, head_dim)
    sums, decays = g.new_empty(keys.shape), g.new_empty(num_chunks, heads, head_dim)
    system, own = g.new_empty(num_chunks, heads, CHUNK_SIZE, CHUNK_SIZE), g.new_empty(num_chunks, heads, CHUNK_SIZE)
    solve, attention = (q.new_empty(system.shape) for _ in range(2))
    _prepare_kernel[(num_chunks, heads)](
        q, k, g, beta, keys, system, solve, attention, own, sums, decays, chunks.start, chunks.length,
        q.stride(0), k.stride(0),
        FIXED=fixed, CHUNK=CHUNK_SIZE, LEVELS=CHUNK_SIZE.bit_length() - 1,
        INVERSE=tl.float32 if q.dtype == torch.float32 else tl.float16,
        num_warps=8, num_stages=1, **early_launch(q.device),
    )  # fmt: skip
    _scan_kernel[(cdiv(head_v_dim, block_v), heads, chunks.max_seqs)](
        v, beta, out, state, keys, solve, attention, own, decays,
        chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first,
        batch.cu_seqlens_q, batch.seq_lens, batch.state_slots,
        num_rows, chunks.first.shape[0] - 1, v.stride(0),
        FIXED=fixed, CHUNK=CHUNK_SIZE, num_warps=tile.warps, num_stages=tile.stages, **early_launch(q.device),
    )  # fmt: skip
    return out
