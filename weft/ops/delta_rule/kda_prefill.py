"""Kimi Delta Attention in chunks, for prefill: the gated delta rule with a decay per channel of the key.

Job: ``kda_gates`` on the GPU, and the launches before the scan of ``chunk_gated_delta_rule`` with ``g [T, H, K]``.
Owns: their split and tile shapes. Does not know: projections, convolution, norms.

As in ``gdn_prefill.py``, but decays do not factor out of the products over channels. Inside a chunk, with G the
running sum of g and S the state before the chunk::

    A_ij  = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for i > j    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)   for i >= j
    delta = (I + A)^-1 beta (v - (exp(G) k) S)
    o     = (exp(G) q) S + P delta
    S'    = exp(G_last) S + (exp(G_last - G) k)^T delta

Every pair i > j lies, for one power of two s, in neighbouring halves of a block of 2 s rows. With b the last row of the
first half, ``exp(G_i - G_j) = exp(G_i - G_b) exp(G_b - G_j)``. Neither factor exceeds 1, and the sum over channels is a
matrix product. Each level s = 1, 2, ... 32 multiplies rows scaled by ``exp(-|G - G_b|)`` with themselves and uses the
entries of its own pairs. Normalised keys and queries are at most 1, so operands in float16 serve bfloat16 inputs better
than bfloat16. The rows ``G_b`` are read from what the program wrote before: they come from the nearest cache. Keys and
queries with their decays are written once, for the scan. The inverse is a chain of small products in a separate launch:
its programs need fewer registers, so more of them run at once and hide latency. On Hopper ``kda_prepare_hopper.py`` is
the first kernel of heads of 128 in bfloat16.

Accuracy: G is a sum of up to 64 float32 numbers. The relative error of a factor ``exp(G_i - G_j)`` is at most ``128 *
2**-24`` times the largest ``|G|`` of the chunk. All other values are rounded as the operands are.

Graph-safe: grids depend on padded sizes alone; chunks of length 0 and sequences without chunks leave at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.config.gated_delta_net import L2_EPS
from weft.forward_context import ChunkTable
from weft.ops.backend import launches
from weft.ops.delta_rule import kda_gates
from weft.ops.delta_rule.unit_lower_inverse import unit_lower_inverse
from weft.ops.delta_rule.vectors import PreparedChunks
from weft.ops.triton.chunk_scan import METADATA
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E, kda_log_decay, sigmoid
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision

if GLUON_IS_KNOWN:
    from weft.ops.delta_rule import kda_prepare_hopper

_L2_EPS = tl.constexpr(L2_EPS)


@jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    f, b, A_log, dt_bias, g, beta, num_tokens, stride_f, stride_b,
    H: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, FLOOR: tl.constexpr,
    EARLY: tl.constexpr,
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
    tl.store(g + tokens[:, None] * (H * K) + columns[None, :], kda_log_decay(rate, x, FLOOR), mask=inside)
    y = tl.load(b + tokens * stride_b + head, mask=tokens < num_tokens, other=0.0).to(tl.float32)
    tl.store(beta + tokens * H + head, sigmoid(y), mask=tokens < num_tokens)


@launches(kda_gates, invariant={})
def kda_gates_triton(f, b, A_log, dt_bias, *, floor) -> tuple[Tensor, Tensor]:
    assert f.stride(1) == b.stride(1) == 1 and A_log.is_contiguous() and dt_bias.is_contiguous()
    num_tokens, heads = f.shape[0], A_log.shape[0]
    dim = f.shape[1] // heads
    g = torch.empty(num_tokens, heads, dim, dtype=torch.float32, device=f.device)
    beta = torch.empty(num_tokens, heads, dtype=torch.float32, device=f.device)
    if num_tokens:
        _gates_kernel[(cdiv(num_tokens, 16), heads)](
            f, b, A_log, dt_bias, g, beta, num_tokens, f.stride(0), b.stride(0),
            H=heads, K=dim, TOKENS=16, BLOCK_K=next_power_of_2(dim), FLOOR=floor, num_warps=4, **early_launch(f.device),
        )  # fmt: skip
    return g, beta


class Shape(NamedTuple):
    """Shape of the first kernel: channels at a time, warps, and the register limit of a thread."""

    channels: int
    warps: int
    max_registers: int | None


def _choose_shape(dtype: torch.dtype) -> Shape:
    """Measured on an H200; see ``benchmarks/kernels/kda.py``."""
    return Shape(32, 8, None) if dtype == torch.float32 else Shape(128, 8, None)


@triton.jit
def _running_sums(p_g, p_sums, p_decay, valid_rows, stride, K: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
                  CHUNK: tl.constexpr):  # fmt: skip
    """Sums of g, times log2(e), from the chunk's start and behind each token to its end; the decay of the whole chunk.

    A thread has some rows of one channel, so sums are additions in registers. Sums to the end are accumulated from the
    end, so they are exact for the tokens that count most.
    """
    ROWS: tl.constexpr = CHUNK // PARTS
    o_part = tl.arange(0, PARTS)[:, None]
    first = o_part * ROWS
    for begin in range(0, K, BLOCK):
        o_c = (begin + tl.arange(0, BLOCK))[None, :]
        c_mask = o_c < K
        decays = ()
        for r in tl.static_range(ROWS):
            inside = (first + r < valid_rows) & c_mask
            decay = tl.load(p_g + (first + r) * stride + o_c, mask=inside, other=0.0) * LOG2_E
            decays = decays + (decay,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
        total = tl.zeros([PARTS, BLOCK], tl.float32)
        for r in tl.static_range(ROWS):
            total += decays[r]
        running = tl.zeros([PARTS, BLOCK], tl.float32)
        rest = tl.zeros([PARTS, BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            of_part = tl.sum(tl.where(o_part == part, total, 0.0), 0)[None, :]
            running += tl.where(o_part > part, of_part, 0.0)
            rest += tl.where(o_part < part, of_part, 0.0)
        for r in tl.static_range(ROWS):
            running += decays[r]
            tl.store(p_sums + (first + r) * K + o_c, running, mask=c_mask)
        for r in tl.static_range(ROWS):
            tl.store(p_sums + (CHUNK + first + ROWS - 1 - r) * K + o_c, rest, mask=c_mask)
            rest += decays[ROWS - 1 - r]
        tl.store(p_decay + o_c + first, tl.exp2(rest), mask=c_mask & (first == 0))


@jit(do_not_specialize_on_alignment=METADATA)
def _prepare_kernel(
    q, k, g, beta, keys, system, attention, vectors, sums, chunk_start, chunk_length, stride_q, stride_k,
    H: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one chunk and head: A and the attention inside the chunk, and keys and queries with their decays."""
    enter(EARLY)
    i_chunk, i_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunk_length + i_chunk)
    if length == 0:
        return
    start = tl.load(chunk_start + i_chunk).to(tl.int64)
    tile = (i_chunk * H + i_head).to(tl.int64)
    p_vectors = vectors + tile * (2 * CHUNK + K)
    p_sums = sums + tile * 2 * CHUNK * K
    p_g = g + (start * H + i_head) * K
    _running_sums(p_g, p_sums, p_vectors + 2 * CHUNK, length, H * K, K, BLOCK, PARTS, CHUNK)
    o_row, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    valid = o_row < length
    i, j = o_row[:, None], o_row[None, :]
    rows, mask = start + i, valid[:, None] & (o_k < K)[None, :]
    p_k, p_q = k + rows * stride_k + i_head * K, q + rows * stride_q + i_head * K
    k_float = tl.load(p_k + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
    q_float = tl.load(p_q + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k_float * k_float, 1) + _L2_EPS)
    q_norm = tl.rsqrt(tl.sum(q_float * q_float, 1) + _L2_EPS)
    scale: tl.constexpr = K**-0.5
    tl.store(p_vectors + CHUNK + o_row, tl.sum(q_float * k_float, 1) * (q_norm * k_norm) * scale)

    kk = tl.zeros([CHUNK, CHUNK], tl.float32)
    qk = tl.zeros([CHUNK, CHUNK], tl.float32)
    levels = 0  # that the chunk's length needs; a loop of unknown length is not unrolled
    for doubling in tl.static_range(LEVELS):
        levels += (length > 1 << doubling).to(tl.int32)
    tl.debug_barrier()  # the sums are written
    for first in range(0, K, BLOCK):
        o_c = first + tl.arange(0, BLOCK)
        c_mask = (o_c < K)[None, :]
        inside = valid[:, None] & c_mask
        b_k = tl.load(p_k + o_c[None, :], mask=inside, other=0.0).to(tl.float32) * k_norm[:, None]
        b_q = tl.load(p_q + o_c[None, :], mask=inside, other=0.0).to(tl.float32) * q_norm[:, None]
        p_columns = p_sums + o_c[None, :]
        from_start = tl.exp2(tl.load(p_columns + i * K, mask=c_mask, other=0.0))
        to_end = tl.exp2(tl.load(p_columns + (CHUNK + i) * K, mask=c_mask, other=0.0))
        p_keys = keys + tile * 3 * CHUNK * K + i * K + o_c[None, :]
        dtype = keys.dtype.element_ty
        tl.store(p_keys, (b_k * from_start).to(dtype), mask=c_mask)
        tl.store(p_keys + CHUNK * K, (b_q * (from_start * scale)).to(dtype), mask=c_mask)
        tl.store(p_keys + 2 * CHUNK * K, (b_k * to_end).to(dtype), mask=c_mask)
        unit_k, unit_q = b_k.to(OPERAND), b_q.to(OPERAND)
        for level in range(levels):
            # Sums are read again at every level, which takes fewer registers.
            boundary = (i >> (level + 1) << (level + 1)) + (1 << level) - 1
            at_boundary = tl.load(p_columns + boundary * K, mask=c_mask, other=0.0)
            own = tl.load(p_columns + i * K, mask=c_mask, other=0.0)
            factor = tl.exp2(-tl.abs(own - at_boundary)).to(OPERAND)
            near, near_q = unit_k * factor, unit_q * factor
            pair = ((i ^ j) >> level == 1) & (i > j)
            kk += tl.where(pair, tl.dot(near, tl.trans(near), input_precision=PRECISION), 0.0)
            qk += tl.where(pair, tl.dot(near_q, tl.trans(near), input_precision=PRECISION), 0.0)
    square = tile * CHUNK * CHUNK + i * CHUNK + j
    tl.store(attention + square, (qk * scale).to(attention.dtype.element_ty))
    b_beta = tl.load(beta + (start + o_row) * H + i_head, mask=valid, other=0.0)
    tl.store(p_vectors + o_row, b_beta)
    tl.store(system + square, (kk * b_beta[:, None]).to(OPERAND))


@jit(do_not_specialize_on_alignment=METADATA)
def _solve_kernel(
    system, solve, chunk_length,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one chunk and head: ``(I + A)^-1 - I``."""
    enter(EARLY)
    if tl.load(chunk_length + tl.program_id(0)) == 0:
        return
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    square = tile * CHUNK * CHUNK + i * CHUNK + j
    inverse = unit_lower_inverse(tl.load(system + square), CHUNK, PRECISION)
    tl.store(solve + square, tl.where(i == j, 0.0, inverse).to(solve.dtype.element_ty))


def prepare_channels(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: ChunkTable, shape: Shape | None = None
) -> PreparedChunks:
    """Compute what the scan needs of chunks with ``g [T, H, K]``; float32 inputs keep float32 accuracy.

    ``shape`` overrides that of the first kernel (measurements).
    """
    assert k.shape[1] == g.shape[1], "a key head for each value head"
    num_chunks, (_, heads, dim) = chunks.start.shape[0], k.shape
    keys = q.new_empty(num_chunks, heads, 3, CHUNK_SIZE, dim)
    solve, attention = (q.new_empty(num_chunks, heads, CHUNK_SIZE, CHUNK_SIZE) for _ in range(2))
    system = torch.empty_like(solve, dtype=torch.float32 if q.dtype == torch.float32 else torch.float16)
    vectors = g.new_empty(num_chunks, heads, 2 * CHUNK_SIZE + dim)
    outputs = keys, system, attention, vectors
    if shape is None and GLUON_IS_KNOWN and kda_prepare_hopper.takes(q, k):
        kda_prepare_hopper.launch_prepare(q, k, g, beta, chunks, outputs)
    else:
        _launch_prepare(q, k, g, beta, chunks, outputs, shape or _choose_shape(q.dtype))
    _solve_kernel[(num_chunks, heads)](
        system, solve, chunks.length,
        CHUNK=CHUNK_SIZE, PRECISION=precision(q), num_warps=4, num_stages=1,
        **early_launch(q.device),
    )  # fmt: skip
    return PreparedChunks(solve, attention, vectors, keys)


def _launch_prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: ChunkTable, outputs: tuple[Tensor, ...], shape: Shape
) -> None:
    num_chunks, (_, heads, dim) = chunks.start.shape[0], k.shape
    sums = g.new_empty(num_chunks, heads, 2, CHUNK_SIZE, dim)
    widest, levels = max(16, next_power_of_2(dim)), CHUNK_SIZE.bit_length() - 1
    block = min(shape.channels, widest)
    _prepare_kernel[(num_chunks, heads)](
        q, k, g, beta, *outputs, sums, chunks.start, chunks.length, q.stride(0), k.stride(0),
        H=heads, K=dim, BLOCK_K=widest, BLOCK=block, PARTS=min(16, 32 * shape.warps // block), CHUNK=CHUNK_SIZE,
        LEVELS=levels,
        OPERAND=tl.float32 if q.dtype == torch.float32 else tl.float16, PRECISION=precision(q),
        num_warps=shape.warps, maxnreg=shape.max_registers, num_stages=1, **early_launch(q.device),
    )  # fmt: skip
