"""The gated delta rule in chunks, for prefill, and one step of it, for the kernel of the decode step.

Job: ``gdn_gates`` and ``chunk_gated_delta_rule`` on the GPU. Owns: the split into launches and their tile shapes. Does
not know: projections, convolution, norms.

The chunked form (WY representation, arXiv 2406.06484, with the decay of arXiv 2412.06464). Inside a chunk, with G the
running sum of g, S the state before the chunk, and rows scaled by vectors written as diagonals::

    A_ij  = beta_i exp(G_i - G_j) (k_i . k_j)   for i > j            P_ij = exp(G_i - G_j) (q_i . k_j)   for i >= j
    delta = (I + A)^-1 beta (v - exp(G) k S)
    o     = exp(G) q S + P delta
    S'    = exp(G_last) S + (exp(G_last - G) k)^T delta

The first kernel needs no state and runs for all chunks and heads at once: it writes the *solve* matrix
``(I + A)^-1 - I``, P below its diagonal, and the row vectors. A token's effect on itself, the two diagonals, stays in
float32: much of what operands in bfloat16 lose is there. The second, ``scan.py``, walks through the chunks.
Normalising queries and keys only scales rows of products, so q, k and v go to the matrix units as they are.

Norms of keys are what stands on the diagonal of their products. Decays are powers of 2, whose exponents come with g.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 and sequences without chunks leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.config.gated_delta_net import L2_EPS
from weft.forward_context import ChunkTable
from weft.ops.backend import launches
from weft.ops.delta_rule import chunk_gated_delta_rule, gdn_gates
from weft.ops.delta_rule.kda_prefill import prepare_channels
from weft.ops.delta_rule.scan import VECTORS, scan_chunks
from weft.ops.delta_rule.unit_lower_inverse import unit_lower_inverse
from weft.ops.delta_rule.vectors import PreparedChunks
from weft.ops.triton.chunk_scan import METADATA, Tile, check_rows
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E, sigmoid, softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2, precision

_L2_EPS = tl.constexpr(L2_EPS)


@jit(do_not_specialize_on_alignment=METADATA)
def _prepare_kernel(
    q, k, g, beta, solve, attention, vectors, chunk_start, chunk_length,
    stride_q, stride_k,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one chunk and value head: the solve matrix, the attention inside the chunk, and the row vectors."""
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
    b_g = tl.load(g + rows * HV + i_head, mask=valid, other=0.0) * LOG2_E
    b_beta = tl.load(beta + rows * HV + i_head, mask=valid, other=0.0)
    decay = tl.cumsum(b_g, 0)
    to_end = tl.cumsum(b_g, 0, reverse=True) - b_g  # summed from the end: exact for the tokens that still count there

    between = tl.exp2(tl.where(i >= j, decay[:, None] - decay[None, :], float("-inf"))) * k_norm[None, :]
    system = tl.where(i > j, kk * between * (b_beta * k_norm)[:, None], 0.0).to(INVERSE)
    qk = qk * between * q_norm[:, None]
    square = ((i_chunk * HV + i_head).to(tl.int64) * CHUNK * CHUNK) + i * CHUNK + j
    own = tl.sum(tl.where(i == j, qk, 0.0), 1)
    tl.store(attention + square, tl.where(i == j, 0.0, qk).to(attention.dtype.element_ty))
    p_vectors = vectors + (i_chunk * HV + i_head).to(tl.int64) * VECTORS * CHUNK + o_row
    tl.store(p_vectors, k_norm * tl.exp2(decay))
    tl.store(p_vectors + CHUNK, q_norm * tl.exp2(decay))
    tl.store(p_vectors + 2 * CHUNK, k_norm * tl.exp2(to_end))
    tl.store(p_vectors + 3 * CHUNK, tl.exp2(to_end + b_g))
    tl.store(p_vectors + 4 * CHUNK, b_beta)
    tl.store(p_vectors + 5 * CHUNK, own)
    inverse = unit_lower_inverse(system, CHUNK, PRECISION)
    tl.store(solve + square, tl.where(i == j, 0.0, inverse).to(solve.dtype.element_ty))


@triton.jit
def delta_rule_step(b_state, b_q, b_k, b_v, decay, beta):
    """Apply one token of the rule to ``b_state [K, V]``, read once: ``o = exp(g) S^T q + (q . k) delta``.

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


@launches(chunk_gated_delta_rule, invariant={})
def chunk_gated_delta_rule_triton(q, k, v, g, beta, state, batch, *, tile: Tile | None = None) -> Tensor:
    """Triton kernels of ``chunk_gated_delta_rule``; float32 inputs are multiplied with float32's accuracy.

    ``tile``: of ``scan_chunks``.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x)
    assert g.is_contiguous() and beta.is_contiguous() and state.is_contiguous()
    out = v.new_empty(v.shape)
    prepared = (prepare_channels if g.dim() == 3 else _prepare)(q, k, g, beta, batch.chunk_table)
    scan_chunks(q, k, v, out, state, prepared, batch, tile=tile)
    return out


def _prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: ChunkTable) -> PreparedChunks:
    num_chunks, num_heads, (_, num_k_heads, head_dim) = chunks.start.shape[0], g.shape[1], k.shape
    solve = q.new_empty(num_chunks, num_heads, CHUNK_SIZE, CHUNK_SIZE)
    attention = torch.empty_like(solve)
    vectors = g.new_empty(num_chunks, num_heads, VECTORS.value, CHUNK_SIZE)
    # With two programs to a multiprocessor left alone, more of them gain from room for four.
    is_crowded = q.dtype != torch.float32 and num_chunks * num_heads > 2 * MULTIPROCESSORS
    _prepare_kernel[(num_chunks, num_heads)](
        q, k, g, beta, solve, attention, vectors, chunks.start, chunks.length,
        q.stride(0), k.stride(0),
        HK=num_k_heads, HV=num_heads, K=head_dim, BLOCK_K=max(16, next_power_of_2(head_dim)),
        CHUNK=CHUNK_SIZE, INVERSE=tl.float32 if q.dtype == torch.float32 else tl.float16, PRECISION=precision(q),
        num_warps=4, num_stages=1, maxnreg=128 if is_crowded else None, **early_launch(q.device),
    )  # fmt: skip
    return PreparedChunks(solve, attention, vectors)


_ELEMENTS = 512
"""Elements of a program, which takes as many whole tokens as fit. At most sizes the launch is the cost."""


@jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    a, b, A_log, dt_bias, g, beta, num_tokens, stride_a, stride_b,
    BETA: tl.constexpr, HV: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens, all heads."""
    enter(EARLY)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    heads = tl.arange(0, BLOCK_H)[None, :]
    mask = (tokens < num_tokens) & (heads < HV)
    x = tl.load(a + tokens * stride_a + heads, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + tokens * stride_b + heads, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + heads, mask=heads < HV, other=0.0).to(tl.float32))
    x += tl.load(dt_bias + heads, mask=heads < HV, other=0.0).to(tl.float32)
    tl.store(g + tokens * HV + heads, -rate * softplus(x), mask=mask)
    tl.store(beta + tokens * HV + heads, sigmoid(y) * BETA, mask=mask)


@launches(gdn_gates, invariant={})
def gdn_gates_triton(a, b, A_log, dt_bias, *, negative_eigenvalues) -> tuple[Tensor, Tensor]:
    """``gdn_gates`` of ``weft/ops/delta_rule``."""
    assert a.shape == b.shape and a.stride(1) == b.stride(1) == 1, f"a {tuple(a.shape)}, b {tuple(b.shape)}"
    assert A_log.is_contiguous() and dt_bias.is_contiguous()
    num_tokens, num_heads = a.shape
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if num_tokens:
        block_h = next_power_of_2(num_heads)
        tokens = max(1, _ELEMENTS // block_h)
        _gates_kernel[(cdiv(num_tokens, tokens),)](
            a, b, A_log, dt_bias, g, beta, num_tokens, a.stride(0), b.stride(0),
            BETA=2.0 if negative_eigenvalues else 1.0, HV=num_heads, TOKENS=tokens, BLOCK_H=block_h,
            num_warps=4, **early_launch(a.device),
        )  # fmt: skip
    return g, beta
