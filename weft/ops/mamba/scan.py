"""The selective scan of Mamba on the GPU: a program walks through one sequence's tokens with some channels' states.

Job: ``selective_scan`` and ``selective_scan_step``, one launch each. The next tokens' inputs are under way while some
are computed. On Hopper prefill takes the kernel of ``scan_gluon.py``. Does not know: projections,
convolution, norms.

Graph-safe: grids depend on padded sizes alone; sequences without chunks leave at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.ops.backend import launches
from weft.ops.mamba import heads_of, selective_scan, selective_scan_step
from weft.ops.triton.chunk_scan import METADATA, find_chunks, metadata, read_state, store_checkpoint
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.elementwise import sigmoid, softplus
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.slot_rows import last_row, row_programs

if GLUON_IS_KNOWN:
    from weft.ops.mamba import scan_gluon as gluon

_BLOCK_C = 64
_TOKENS = 4
"""Tokens whose inputs are read at a time; chunks end anywhere, the others of a group are then masked."""


@triton.jit
def _token(b_state, b_rate, b_x, b_z, b_dt, b_b, b_c, b_bias, b_skip):
    """Compute one token from ``b_state [N, BLOCK_C]``: the new state, and the output ``[BLOCK_C]``."""
    step = softplus(b_dt + b_bias)
    b_state = b_state * tl.exp(b_rate * step[None, :]) + b_b[:, None] * (step * b_x)[None, :]
    y = tl.sum(b_state * b_c[:, None], 0) + b_skip * b_x
    return b_state, y * b_z * sigmoid(b_z)


@triton.jit
def _head_offset(C: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Where B and C of this program's channels begin in a row; a block of channels belongs to one head."""
    if HEADS == 1:
        return 0
    return tl.program_id(0) * BLOCK_C // (C // HEADS) * N


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["state_slots"])
def _scan_step_kernel(
    x, z, dt, b, c, dt_bias, A_log, D, state, state_slots, out, num_rows, stride_x, stride_z, stride_dt,
    C: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a block of channels of one row, or of a share of ``num_rows`` rows. A state, which an earlier step wrote,
    begins to load before the wait."""
    release(EARLY)
    i_row, programs = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    o_n, o_c = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n_mask, c_mask = o_n < N, o_c < C
    count = 1 if num_rows is None else last_row(state_slots, num_rows, i_row, programs, EARLY)
    for _ in range(count):
        slot = tl.load(state_slots + i_row).to(tl.int64)
        if slot != 0:
            inside = o_n[:, None] * C + o_c[None, :]
            mask = n_mask[:, None] & c_mask[None, :]
            p_state = state + slot * N * C + inside
            b_state = tl.load(p_state, mask=mask, other=0.0).to(tl.float32)
            b_rate = -tl.exp(tl.load(A_log + inside, mask=mask, other=0.0).to(tl.float32))
            b_bias = tl.load(dt_bias + o_c, mask=c_mask, other=0.0).to(tl.float32)
            b_skip = tl.load(D + o_c, mask=c_mask, other=0.0).to(tl.float32)
            wait(EARLY)
            b_x = tl.load(x + i_row * stride_x + o_c, mask=c_mask, other=0.0).to(tl.float32)
            b_z = tl.load(z + i_row * stride_z + o_c, mask=c_mask, other=0.0).to(tl.float32)
            b_dt = tl.load(dt + i_row * stride_dt + o_c, mask=c_mask, other=0.0).to(tl.float32)
            p_head = i_row * HEADS * N + _head_offset(C, N, HEADS, BLOCK_C)
            b_b = tl.load(b + p_head + o_n, mask=n_mask, other=0.0).to(tl.float32)
            b_c = tl.load(c + p_head + o_n, mask=n_mask, other=0.0).to(tl.float32)
            b_state, y = _token(b_state, b_rate, b_x, b_z, b_dt, b_b, b_c, b_bias, b_skip)
            tl.store(p_state, b_state.to(state.dtype.element_ty), mask=mask)
            tl.store(out + i_row * C + o_c, y.to(out.dtype.element_ty), mask=c_mask)
        elif num_rows is None:
            wait(EARLY)
            tl.store(out + i_row * C + o_c, tl.zeros([BLOCK_C], out.dtype.element_ty), mask=c_mask)
        i_row += programs


@triton.jit
def _read(
    tokens, x, z, dt, b, c, begin, end, o_n, o_c, n_mask, c_mask, stride_x, stride_z, stride_dt,
    STRIDE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """``tokens`` and the inputs of ``COUNT`` tokens from ``begin`` on, five vectors each; zero from ``end`` on."""
    for i in tl.static_range(COUNT):
        row, inside = begin + i, begin + i < end
        here = c_mask & inside
        b_x = tl.load(x + row * stride_x + o_c, mask=here, other=0.0)
        b_z = tl.load(z + row * stride_z + o_c, mask=here, other=0.0)
        b_dt = tl.load(dt + row * stride_dt + o_c, mask=here, other=0.0)
        b_b = tl.load(b + row * STRIDE + o_n, mask=n_mask & inside, other=0.0)
        b_c = tl.load(c + row * STRIDE + o_n, mask=n_mask & inside, other=0.0)
        tokens = tokens + (b_x, b_z, b_dt, b_b, b_c)  # noqa: RUF005 (kernels cannot unpack)
    return tokens


@jit(do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _selective_scan_kernel(
    x, z, dt, b, c, dt_bias, A_log, D, state, out,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_x, stride_z, stride_dt,
    C: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one sequence and block of channels: its tokens in order, the state in registers."""
    enter(EARLY)
    i_prefill = tl.program_id(1)
    o_n, o_c = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n_mask, c_mask = o_n < N, o_c < C
    i_seq, first, last = find_chunks(
        out, chunk_seq, chunk_start, first_chunk, cu_seqlens_q, num_rows, num_seqs, 0, i_prefill, o_c, c_mask,
        1, C, CHUNK,
    )  # fmt: skip
    if first == last:
        return
    inside = o_n[:, None] * C + o_c[None, :]
    mask = n_mask[:, None] & c_mask[None, :]
    p_state, b_state = read_state(state, cu_seqlens_q, seq_lens, state_slots, i_seq, 0, inside, mask, 1, N * C)
    b_rate = -tl.exp(tl.load(A_log + inside, mask=mask, other=0.0).to(tl.float32))
    b_bias = tl.load(dt_bias + o_c, mask=c_mask, other=0.0).to(tl.float32)
    b_skip = tl.load(D + o_c, mask=c_mask, other=0.0).to(tl.float32)
    head = _head_offset(C, N, HEADS, BLOCK_C)
    for i_chunk in range(first, last):
        start = tl.load(chunk_start + i_chunk).to(tl.int64)
        end = start + tl.load(chunk_length + i_chunk)
        tokens = _read(
            (), x, z, dt, b + head, c + head, start, end, o_n, o_c, n_mask, c_mask, stride_x, stride_z, stride_dt,
            HEADS * N, TOKENS,
        )  # fmt: skip
        for token in range(start, end, TOKENS):
            ahead = _read(
                (), x, z, dt, b + head, c + head, token + TOKENS, end, o_n, o_c, n_mask, c_mask, stride_x, stride_z,
                stride_dt, HEADS * N, TOKENS,
            )  # fmt: skip
            for i in tl.static_range(TOKENS):
                b_x, b_z = tokens[5 * i].to(tl.float32), tokens[5 * i + 1].to(tl.float32)
                b_dt, b_b = tokens[5 * i + 2].to(tl.float32), tokens[5 * i + 3].to(tl.float32)
                new, y = _token(b_state, b_rate, b_x, b_z, b_dt, b_b, tokens[5 * i + 4].to(tl.float32), b_bias, b_skip)
                real = token + i < end
                b_state = tl.where(real, new, b_state)
                tl.store(out + (token + i) * C + o_c, y.to(out.dtype.element_ty), mask=c_mask & real)
            tokens = ahead
        store_checkpoint(state, checkpoint_slot, i_chunk, 0, inside, mask, b_state, 1, N * C)
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=mask)


@launches(selective_scan_step, invariant={})
def selective_scan_step_triton(x, z, dt, b, c, weights, state, state_slots, *, out) -> Tensor:
    (num_rows, channels), size = x.shape, b.shape[-1]
    dt_bias, A_log, D = weights
    _check(x, z, dt, b, c, A_log, state)
    keep, out = out is not None, x.new_empty(x.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if num_rows:
        heads, block = heads_of(b), _channel_block(channels, heads_of(b))
        blocks = cdiv(channels, block)
        programs, rows = row_programs(num_rows, blocks, keep=keep)
        _scan_step_kernel[(blocks, programs)](
            x, z, dt, b, c, dt_bias, A_log, D, state, state_slots, out, rows, x.stride(0), z.stride(0), dt.stride(0),
            C=channels, N=size, HEADS=heads, BLOCK_N=next_power_of_2(size), BLOCK_C=block,
            num_warps=1, **early_launch(x.device),
        )  # fmt: skip
    return out


@launches(selective_scan, invariant={"fixed": True})
def selective_scan_triton(x, z, dt, b, c, weights, state, batch, *, fixed: bool = False) -> Tensor:
    """Triton kernel of ``selective_scan``. ``fixed``: one order of a channel's states for any number of sequences."""
    chunks, (num_rows, channels), size, heads = batch.chunk_table, x.shape, b.shape[-1], heads_of(b)
    dt_bias, A_log, D = weights
    _check(x, z, dt, b, c, A_log, state)
    out = x.new_empty(x.shape)
    if GLUON_IS_KNOWN and gluon.takes(x, b):
        shape = gluon.choose_shape(1, channels) if fixed else None
        gluon.launch_selective_scan(x, z, dt, b, c, weights, state, out, batch, shape)
        return out
    block = _channel_block(channels, heads)
    _selective_scan_kernel[(cdiv(channels, block), chunks.max_seqs)](
        x, z, dt, b, c, dt_bias, A_log, D, state, out,
        *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1, x.stride(0), z.stride(0), dt.stride(0),
        C=channels, N=size, HEADS=heads, BLOCK_N=next_power_of_2(size), BLOCK_C=block, TOKENS=_TOKENS,
        CHUNK=CHUNK_SIZE, num_warps=2, **early_launch(x.device),
    )  # fmt: skip
    return out


def _channel_block(channels: int, heads: int) -> int:
    """Channels of a program, which belong to one head."""
    share = channels // heads
    return min(_BLOCK_C, next_power_of_2(share) if heads == 1 else share & -share)


def _check(x: Tensor, z: Tensor, dt: Tensor, b: Tensor, c: Tensor, A_log: Tensor, state: Tensor) -> None:
    assert x.stride(1) == z.stride(1) == dt.stride(1) == 1, "channels must be dense"
    assert b.is_contiguous() and c.is_contiguous() and A_log.is_contiguous() and state.is_contiguous()
