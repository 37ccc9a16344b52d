"""The gated delta rule in chunks, for prefill, and one step of it, for the kernel of the decode step.

Job: ``chunk_gated_delta_rule`` on the GPU. Owns: its split into two launches and their tile shapes. Does not know:
projections, convolution, norms.

The chunked form (WY representation, arXiv 2406.06484, with the decay of arXiv 2412.06464). Inside a chunk, with G the
running sum of g, S the state before the chunk, and rows scaled by vectors written as diagonals::

    A_ij  = beta_i exp(G_i - G_j) (k_i . k_j)   for i > j            P_ij = exp(G_i - G_j) (q_i . k_j)   for i >= j
    delta = (I + A)^-1 beta (v - exp(G) k S)
    o     = exp(G) q S + P delta
    S'    = exp(G_last) S + (exp(G_last - G) k)^T delta

The first kernel needs no state and runs for all chunks and heads at once: it writes the *solve* matrix
``(I + A)^-1 - I``, P below its diagonal, and the row vectors. A token's effect on itself, the two diagonals, stays in
float32: much of what operands in bfloat16 lose is there. The second walks through the chunks of each sequence with a
slice of the state, ``[K, BLOCK_V]``, in float32 registers; outputs, checkpoints and the final state leave in the same
pass, and no state in between is written. Normalising queries and keys only scales rows of products, so q, k and v go to
the matrix units as they are.

Norms of keys are what stands on the diagonal of their products. Decays are powers of 2, whose exponents come with g.

On Hopper the second kernel is that of ``delta_scan_hopper.py``.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 and sequences without chunks leave at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.config.gated_delta_net import CHUNK_SIZE
from weft.forward_context import Batch, ChunkTable
from weft.ops.triton.chunk_scan import METADATA, find_chunks, read_state, store_checkpoint
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2
from weft.ops.triton.unit_lower_inverse import unit_lower_inverse

if GLUON_IS_KNOWN:
    from weft.ops.triton import delta_scan_hopper as hopper

_L2_EPS = tl.constexpr(1e-6)
_LOG2_E = tl.constexpr(1.4426950408889634)
_VECTORS = tl.constexpr(8)
"""Six are used; the copy engine takes powers of two."""


class Tile(NamedTuple):
    """The scan's shape: columns of the state per program, warps, pipeline stages."""

    block_v: int
    warps: int
    stages: int


@jit(do_not_specialize_on_alignment=METADATA)
def _prepare_kernel(
    q, k, g, beta, solve, attention, vectors, chunk_start, chunk_length,
    stride_q, stride_k,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One chunk and value head: the solve matrix, the attention inside the chunk, and the row vectors."""
    enter(EARLY)
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunk_length + i_chunk)
    if length == 0:
        return
    start = tl.load(chunk_start + i_chunk).to(tl.int64)
    o_row, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    valid = o_row < length
    rows = start + o_row
    mask = valid[:, None] & (o_k < K)[None, :]
    columns = (i_head // (HV // HK)) * K + o_k
    b_k = tl.load(k + rows[:, None] * stride_k + columns[None, :], mask=mask, other=0.0)
    b_q = tl.load(q + rows[:, None] * stride_q + columns[None, :], mask=mask, other=0.0)

    i, j = o_row[:, None], o_row[None, :]
    keys = tl.trans(b_k)
    kk, qk = tl.dot(b_k, keys, input_precision=PRECISION), tl.dot(b_q, keys, input_precision=PRECISION)
    q_float = b_q.to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(q_float * q_float, 1) + _L2_EPS) * (K**-0.5)
    k_norm = tl.rsqrt(tl.sum(tl.where(i == j, kk, 0.0), 1) + _L2_EPS)
    b_g = tl.load(g + rows * HV + i_head, mask=valid, other=0.0) * _LOG2_E
    b_beta = tl.load(beta + rows * HV + i_head, mask=valid, other=0.0)
    decay = tl.cumsum(b_g, 0)
    to_end = tl.cumsum(b_g, 0, reverse=True) - b_g  # summed from the end: exact for the tokens that still count there

    between = tl.exp2(tl.where(i >= j, decay[:, None] - decay[None, :], float("-inf"))) * k_norm[None, :]
    system = tl.where(i > j, kk * between * (b_beta * k_norm)[:, None], 0.0).to(INVERSE)
    qk = qk * between * q_norm[:, None]
    square = ((i_chunk * HV + i_head).to(tl.int64) * CHUNK * CHUNK) + i * CHUNK + j
    own = tl.sum(tl.where(i == j, qk, 0.0), 1)
    tl.store(attention + square, tl.where(i == j, 0.0, qk).to(attention.dtype.element_ty))
    p_vectors = vectors + (i_chunk * HV + i_head).to(tl.int64) * _VECTORS * CHUNK + o_row
    tl.store(p_vectors, k_norm * tl.exp2(decay))
    tl.store(p_vectors + CHUNK, q_norm * tl.exp2(decay))
    tl.store(p_vectors + 2 * CHUNK, k_norm * tl.exp2(to_end))
    tl.store(p_vectors + 3 * CHUNK, tl.exp2(to_end + b_g))
    tl.store(p_vectors + 4 * CHUNK, b_beta)
    tl.store(p_vectors + 5 * CHUNK, own)
    inverse = unit_lower_inverse(system, CHUNK, PRECISION)
    tl.store(solve + square, tl.where(i == j, 0.0, inverse).to(solve.dtype.element_ty))


class Fixed(NamedTuple):
    """What the scan is compiled for.

    Attributes:
        num_k_heads, num_v_heads, head_k_dim, head_v_dim: of the layer, as in ``GatedDeltaNetConfig``.
        block_k, block_v: of a slice of the state.
        zero_decodes: write zeros to the rows before the first sequence that has chunks.
        precision: of products of float32 operands.
        stages: of the pipeline.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    block_k: int
    block_v: int
    zero_decodes: bool
    precision: str
    stages: int


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _scan_kernel(
    q, k, v, out, state, solve, attention, vectors,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_q, stride_k, stride_v,
    FIXED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and slice of V: the chunks in order, the state's columns in registers."""
    enter(EARLY)
    HK: tl.constexpr = FIXED.num_k_heads
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
        HV, V, CHUNK, FIXED.zero_decodes,
    )  # fmt: skip
    if first == last:
        return

    square = o_row[:, None] * CHUNK + o_row[None, :]
    inside = o_k[:, None] * V + o_v[None, :]
    state_mask = k_mask[:, None] & v_mask[None, :]
    p_state, b_state = read_state(
        state, cu_seqlens_q, seq_lens, state_slots, i_seq, i_head, inside, state_mask, HV, K * V
    )  # fmt: skip
    key_columns = (i_head // (HV // HK)) * K + o_k
    value_columns = i_head * V + o_v
    keys = o_row[:, None] * stride_k + key_columns[None, :]
    queries = o_row[:, None] * stride_q + key_columns[None, :]
    values = o_row[:, None] * stride_v + value_columns[None, :]
    outputs = o_row[:, None] * (HV * V) + value_columns[None, :]
    operand = q.dtype.element_ty
    start = tl.load(chunk_start + first).to(tl.int64)
    length = tl.load(chunk_length + first)
    for i_chunk in tl.range(first, last, num_stages=FIXED.stages):
        # The next chunk's length is read one chunk ahead, so that the addresses of its tiles wait for nothing.
        next_length = tl.load(chunk_length + i_chunk + 1, mask=i_chunk + 1 < last, other=0)
        valid = o_row < length
        tile = (i_chunk * HV + i_head).to(tl.int64)
        mask = valid[:, None]
        if FIXED.block_k > K:
            mask = mask & k_mask[None, :]
        b_k = tl.load(k + start * stride_k + keys, mask=mask, other=0.0)
        b_q = tl.load(q + start * stride_q + queries, mask=mask, other=0.0)
        mask = valid[:, None] & v_mask[None, :]
        b_v = tl.load(v + start * stride_v + values, mask=mask, other=0.0)
        b_solve = tl.load(solve + tile * CHUNK * CHUNK + square)
        b_attention = tl.load(attention + tile * CHUNK * CHUNK + square)
        p_vectors = vectors + tile * _VECTORS * CHUNK + o_row
        k_scale, q_scale, k_to_end = tl.load(p_vectors), tl.load(p_vectors + CHUNK), tl.load(p_vectors + 2 * CHUNK)
        b_beta, own = tl.load(p_vectors + 4 * CHUNK), tl.load(p_vectors + 5 * CHUNK)
        chunk_decay = tl.load(vectors + tile * _VECTORS * CHUNK + 3 * CHUNK)

        old = b_state.to(operand)
        right = (b_v - tl.dot(b_k, old, input_precision=PRECISION) * k_scale[:, None]) * b_beta[:, None]
        b_out = tl.dot(b_q, old, input_precision=PRECISION) * q_scale[:, None]
        delta = tl.dot(b_solve, right.to(operand), right, input_precision=PRECISION)
        b_state = b_state * chunk_decay
        b_state = tl.dot(tl.trans(b_k), (delta * k_to_end[:, None]).to(operand), b_state, input_precision=PRECISION)
        b_out = tl.dot(b_attention, delta.to(operand), b_out + delta * own[:, None], input_precision=PRECISION)
        tl.store(out + start * (HV * V) + outputs, b_out.to(out.dtype.element_ty), mask=mask)

        store_checkpoint(state, checkpoint_slot, i_chunk, i_head, inside, state_mask, b_state, HV, K * V)
        start += length
        length = next_length
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=state_mask)


@triton.jit
def delta_rule_step(b_state, b_q, b_k, b_v, decay, beta):
    """One token of the rule on ``b_state [K, V]``, read once: ``o = exp(g) S^T q + (q . k) delta``.

    Args: normalised float32 vectors, ``b_q`` scaled.

    Returns: the output ``[V]`` and the new state.
    """
    b_state *= decay
    from_k = tl.sum(b_state * b_k[:, None], 0)
    from_q = tl.sum(b_state * b_q[:, None], 0)
    delta = (b_v - from_k) * beta
    return from_q + tl.sum(b_q * b_k, 0) * delta, b_state + b_k[:, None] * delta[None, :]


@triton.jit
def l2_normalize(x):
    """``x / sqrt(sum(x^2) + eps)`` of a float32 vector."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + _L2_EPS)


def _check_rows(name: str, x: Tensor) -> None:
    """Tokens may be strided (a slice of a wider projection); heads and their dimensions must be dense."""
    assert x.stride(2) == 1 and x.stride(1) == x.shape[2], f"{name}: heads must be dense, got strides {x.stride()}"


def choose_tile(num_rows: int, head_v_dim: int, dtype: torch.dtype) -> Tile:
    """The scan's tile (measured on H200; see ``benchmarks/kernels/gdn.py``).

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


def chunk_gated_delta_rule_triton(
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
    """Triton kernels of ``chunk_gated_delta_rule``; float32 inputs are multiplied with float32's accuracy.

    ``tile`` overrides the choice of ``choose_tile`` (tests and measurements).
    """
    chunks = batch.chunks[CHUNK_SIZE]
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rows(name, x)
    assert g.is_contiguous() and beta.is_contiguous() and state.is_contiguous()
    zero_decodes = out is None
    out = v.new_empty(v.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    prepared = _prepare(q, k, g, beta, chunks)
    # A captured graph does not know how many sequences there will be; short latency is for the case of one.
    num_seqs = 1 if batch.mixture is not None else chunks.max_seqs
    if tile is None and GLUON_IS_KNOWN and hopper.takes(q, k, v):
        hopper.launch_delta_scan(q, k, v, out, state, *prepared, batch, zero_decodes=zero_decodes)
        return out
    tile = tile or choose_tile(num_seqs * v.shape[1], v.shape[2], q.dtype)
    _scan(q, k, v, out, state, prepared, batch, tile, zero_decodes)
    return out


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: ChunkTable) -> tuple[Tensor, Tensor, Tensor]:
    """``solve``, ``attention`` ``[chunks, HV, 64, 64]`` in q's dtype and ``vectors [chunks, HV, 8, 64]`` float32."""
    num_chunks, num_heads, (_, num_k_heads, head_dim) = chunks.start.shape[0], g.shape[1], k.shape
    solve = q.new_empty(num_chunks, num_heads, CHUNK_SIZE, CHUNK_SIZE)
    attention = torch.empty_like(solve)
    vectors = g.new_empty(num_chunks, num_heads, _VECTORS.value, CHUNK_SIZE)
    # With two programs to a multiprocessor left alone, more of them gain from room for four.
    is_crowded = q.dtype != torch.float32 and num_chunks * num_heads > 2 * MULTIPROCESSORS
    _prepare_kernel[(num_chunks, num_heads)](
        q, k, g, beta, solve, attention, vectors, chunks.start, chunks.length,
        q.stride(0), k.stride(0),
        HK=num_k_heads, HV=num_heads, K=head_dim, BLOCK_K=max(16, next_power_of_2(head_dim)),
        CHUNK=CHUNK_SIZE, INVERSE=tl.float32 if q.dtype == torch.float32 else tl.float16, PRECISION=_precision(q.dtype),
        num_warps=4, num_stages=1, maxnreg=128 if is_crowded else None, **early_launch(q.device),
    )  # fmt: skip
    return solve, attention, vectors


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    state: Tensor,
    prepared: tuple[Tensor, Tensor, Tensor],
    batch: Batch,
    tile: Tile,
    zero_decodes: bool,
) -> None:
    chunks = batch.chunks[CHUNK_SIZE]
    num_rows, num_heads, head_v_dim = v.shape
    block_v = max(16, tile.block_v)
    fixed = Fixed(
        k.shape[1], num_heads, k.shape[2], head_v_dim, max(16, next_power_of_2(k.shape[2])), block_v, zero_decodes,
        _precision(q.dtype), tile.stages,
    )  # fmt: skip
    _scan_kernel[(cdiv(head_v_dim, block_v), num_heads, chunks.max_seqs)](
        q, k, v, out, state, *prepared,
        chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first,
        batch.cu_seqlens_q, batch.seq_lens, batch.state_slots,
        num_rows, chunks.first.shape[0] - 1, q.stride(0), k.stride(0), v.stride(0),
        FIXED=fixed, CHUNK=CHUNK_SIZE, num_warps=tile.warps, num_stages=tile.stages, **early_launch(q.device),
    )  # fmt: skip
