"""The selective scan's walk through a sequence, in Gluon: a few of a channel's states to a thread.

Job: what the prefill kernel of ``scan.py`` does, on Hopper, for states of 16. Owns: who computes what.

The scan is bound by one exponential per token, channel and state. A channel's 16 states lie in 2 to 8 neighbouring
threads, so one sequence fills the device, and a token's output is a sum over these threads alone. All other values are
computed once per token and channel, for a group of 16 or 32 tokens at a time, and go through shared memory. Time steps
are computed before the walk through the group, skip and gate after the walk. The next group's inputs are on their way
to registers meanwhile.

A token of no chunk has the time step 0, which leaves the state as it is.

Graph-safe: grids depend on padded sizes alone; sequences without chunks leave at once.
"""

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.forward_context import Batch
from weft.ops.mamba import ScanWeights, heads_of
from weft.ops.triton.chunk_scan import METADATA, metadata
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.gluon import reinterpret, thread_barrier
from weft.ops.triton.hopper import GluonKernel, runs_gluon

_N = gl.constexpr(16)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class Shape(NamedTuple):
    """States of a channel in a thread, warps, and tokens of a group."""

    states: int
    warps: int
    tokens: int = 16

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return 2 * self.states * self.warps


@gluon.jit
def _softplus(x):
    """``log(1 + exp(x))``, relative error below 1e-6: the logarithm is a polynomial, fitted at Chebyshev's points."""
    e = gl.exp2(gl.abs(x) * -LOG2_E)
    p = e * 0.005253457929939032 - 0.02958850748836994
    p = p * e + 0.07836166769266129
    p = p * e - 0.13674770295619965
    p = p * e + 0.19111430644989014
    p = p * e - 0.24844369292259216
    p = p * e + 0.33319270610809326
    p = p * e - 0.49999502301216125
    p = p * e + 1.0
    return gl.maximum(x, 0.0) + p * e


@gluon.jit
def _gate(z):
    """``z / (1 + exp(-z))``."""
    root = gl.rsqrt(1.0 + gl.exp2(z * -LOG2_E))
    return z * root * root


@gluon.jit
def _read(p_inputs, begin, end, strides, o_t, o_c, o_t_small, o_n, STRIDE: gl.constexpr):
    """The inputs x, z, dt, b, c of the tokens from ``begin`` on; zero from ``end`` on."""
    x, z, dt, b, c = p_inputs
    stride_x, stride_z, stride_dt = strides
    rows = (begin + o_t)[:, None]
    inside = rows < end
    columns = o_c[None, :]
    b_x = gl.load(x + rows * stride_x + columns, mask=inside, other=0.0)
    b_z = gl.load(z + rows * stride_z + columns, mask=inside, other=0.0)
    b_dt = gl.load(dt + rows * stride_dt + columns, mask=inside, other=0.0)
    rows = (begin + o_t_small)[:, None]
    inside = rows < end
    b_b = gl.load(b + rows * STRIDE + o_n[None, :], mask=inside, other=0.0)
    b_c = gl.load(c + rows * STRIDE + o_n[None, :], mask=inside, other=0.0)
    return b_x, b_z, b_dt, b_b, b_c


@gluon.jit
def _joined(parts, COUNT: gl.constexpr):
    """One tensor of ``2 * COUNT`` tensors, with a last dimension of 2 for each power of two, the lowest one last."""
    joined = ()
    for i in gl.static_range(COUNT):
        joined = joined + (gl.join(parts[i], parts[i + COUNT]),)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    if COUNT > 1:
        joined = _joined(joined, COUNT // 2)
    return joined


@gluon.jit
def _walk(b_state, b_rate, tiles, WALK: gl.constexpr, CHANNELS: gl.constexpr, TOKENS: gl.constexpr):
    """The group's tokens in order: the new state, and ``S_t . C_t`` of all tokens ``[CHANNELS, TOKENS]``."""
    steps, inputs, b_tile, c_tile = tiles
    outputs = ()
    for t in gl.static_range(TOKENS):
        step = steps.slice(t * CHANNELS, CHANNELS).load(gl.SliceLayout(0, WALK))
        entering = inputs.slice(t * CHANNELS, CHANNELS).load(gl.SliceLayout(0, WALK))
        b_b = b_tile.slice(t * _N, _N).load(gl.SliceLayout(1, WALK))
        b_c = c_tile.slice(t * _N, _N).load(gl.SliceLayout(1, WALK))
        b_state = b_state * gl.exp2(b_rate * step[None, :]) + b_b[:, None] * entering[None, :]
        outputs = outputs + (gl.sum(b_state * b_c[:, None], 0),)  # type: ignore[assignment]  # noqa: RUF005
    # One store for all tokens: the compiler would let a store for each token wait for the previous store.
    return b_state, _joined(outputs, TOKENS // 2)[0].reshape([CHANNELS, TOKENS])


@gluon.jit
def _zero_rows(
    out, begin, end, o_t, o_c, C: gl.constexpr, TOKENS: gl.constexpr, CHANNELS: gl.constexpr, TILE: gl.constexpr
):
    """Zero some columns of the rows ``begin`` to ``end``."""
    zeros = gl.full([TOKENS, CHANNELS], 0.0, out.dtype.element_ty, layout=TILE)
    for row in range(begin, end, TOKENS):
        rows = (row + o_t)[:, None]
        gl.store(out + rows * C + o_c[None, :], zeros, mask=rows < end)


@functools.partial(GluonKernel, do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _selective_scan_gluon_kernel(
    x, z, dt, b, c, dt_bias, A_log, D, state, out,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, stride_x, stride_z, stride_dt,
    C: gl.constexpr, HEADS: gl.constexpr, SHAPE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute one sequence and block of channels of one head: its tokens in order, the state in registers."""
    enter(EARLY)
    STATES: gl.constexpr = SHAPE.states
    WARPS: gl.constexpr = SHAPE.warps
    CHANNELS: gl.constexpr = 2 * STATES * WARPS
    TOKENS: gl.constexpr = SHAPE.tokens
    STRIDE: gl.constexpr = HEADS * _N
    OUTPUTS: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // TOKENS, TOKENS // 4, [1, 0])
    WALK: gl.constexpr = gl.BlockedLayout([STATES, 1], [_N // STATES, 2 * STATES], [1, WARPS], [0, 1])
    ACROSS: gl.constexpr = CHANNELS // 4 if CHANNELS < 128 else 32
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [WARPS, 1], [1, 0])
    o_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, TILE)).to(gl.int64)
    o_c = gl.program_id(0) * CHANNELS + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, TILE))
    o_t_small = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SMALL)).to(gl.int64)
    o_n_small = gl.arange(0, _N, layout=gl.SliceLayout(0, SMALL))
    i_prefill = gl.program_id(1)
    num_chunks = gl.load(first_chunk + num_seqs)
    if i_prefill == 0:
        num_tokens = gl.load(cu_seqlens_q + num_seqs).to(gl.int64)
        begin = num_tokens
        if num_chunks > 0:
            begin = gl.load(chunk_start).to(gl.int64)
        _zero_rows(out, num_tokens, num_rows.to(gl.int64), o_t, o_c, C, TOKENS, CHANNELS, TILE)
        _zero_rows(out, num_tokens - num_tokens, begin, o_t, o_c, C, TOKENS, CHANNELS, TILE)
    i_seq = gl.load(chunk_seq, mask=num_chunks > 0, other=0) + i_prefill  # decodes stand before the first one
    is_there = (num_chunks > 0) & (i_seq < num_seqs)
    first = gl.load(first_chunk + i_seq, mask=is_there, other=0)
    last = gl.load(first_chunk + i_seq + 1, mask=is_there, other=0)
    if first < last:
        channels = gl.program_id(0) * CHANNELS + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, WALK))
        inside = gl.arange(0, _N, layout=gl.SliceLayout(1, WALK))[:, None] * C + channels[None, :]
        slot = gl.load(state_slots + i_seq).to(gl.int64)
        begin = gl.load(cu_seqlens_q + i_seq)
        seq_end = gl.load(cu_seqlens_q + i_seq + 1)
        continues = gl.load(seq_lens + i_seq) != seq_end - begin
        b_state = gl.full([_N, CHANNELS], 0.0, gl.float32, layout=WALK)
        if continues:
            b_state = gl.load(state + slot * (_N * C) + inside).to(gl.float32)
        b_rate = gl.exp2(gl.load(A_log + inside).to(gl.float32) * LOG2_E) * -LOG2_E
        b_bias = gl.load(dt_bias + o_c).to(gl.float32)[None, :]
        b_skip = gl.load(D + o_c).to(gl.float32)[None, :]
        steps = gl.allocate_shared_memory(gl.float32, [TOKENS * CHANNELS], _FLAT)
        inputs = gl.allocate_shared_memory(gl.float32, [TOKENS * CHANNELS], _FLAT)
        b_tile = gl.allocate_shared_memory(gl.float32, [TOKENS * _N], _FLAT)
        c_tile = gl.allocate_shared_memory(gl.float32, [TOKENS * _N], _FLAT)
        y_tile = gl.allocate_shared_memory(gl.float32, [CHANNELS, TOKENS], OUTPUTS)
        tiles = (steps, inputs, b_tile, c_tile)
        if HEADS > 1:
            head = gl.program_id(0) * CHANNELS // (C // HEADS)
            b += head * _N
            c += head * _N
        p_inputs, strides = (x, z, dt, b, c), (stride_x, stride_z, stride_dt)
        start = gl.load(chunk_start + first).to(gl.int64)
        length = gl.load(chunk_length + first)
        copy_slot = gl.load(checkpoint_slot + first).to(gl.int64)
        ahead = _read(p_inputs, start, seq_end, strides, o_t, o_c, o_t_small, o_n_small, STRIDE)
        for i_chunk in range(first, last):
            # The next chunk's length is read one chunk ahead.
            more = i_chunk + 1 < last
            next_length = gl.load(chunk_length + i_chunk + 1, mask=more, other=0)
            next_slot = gl.load(checkpoint_slot + i_chunk + 1, mask=more, other=0).to(gl.int64)
            end = start + length
            for token in range(start, end, TOKENS):
                b_x, b_z, b_dt, b_b, b_c = ahead
                inside_chunk = (token + o_t < end)[:, None]
                step = gl.where(inside_chunk, _softplus(b_dt.to(gl.float32) + b_bias), 0.0)
                b_x = b_x.to(gl.float32)
                reinterpret(steps, gl.float32, [TOKENS, CHANNELS], _ROWS).store(step)
                entering = gl.where(inside_chunk, step * b_x, 0.0)
                reinterpret(inputs, gl.float32, [TOKENS, CHANNELS], _ROWS).store(entering)
                inside_small = (token + o_t_small < end)[:, None]
                b_b = gl.where(inside_small, b_b.to(gl.float32), 0.0)
                reinterpret(b_tile, gl.float32, [TOKENS, _N], _ROWS).store(b_b)
                reinterpret(c_tile, gl.float32, [TOKENS, _N], _ROWS).store(b_c.to(gl.float32))
                following = gl.minimum(token + TOKENS, end)
                ahead = _read(p_inputs, following, seq_end, strides, o_t, o_c, o_t_small, o_n_small, STRIDE)
                thread_barrier()
                b_state, y = _walk(b_state, b_rate, tiles, WALK, CHANNELS, TOKENS)
                y_tile.store(y)
                thread_barrier()
                y = y_tile.permute((1, 0)).load(TILE)
                y = (y + b_skip * b_x) * _gate(b_z.to(gl.float32))
                rows = (token + o_t)[:, None]
                gl.store(out + rows * C + o_c[None, :], y.to(out.dtype.element_ty), mask=inside_chunk)
            if copy_slot >= 0:
                gl.store(state + copy_slot * (_N * C) + inside, b_state.to(state.dtype.element_ty))
            start, length, copy_slot = end, next_length, next_slot
        gl.store(state + slot * (_N * C) + inside, b_state.to(state.dtype.element_ty))


def choose_shape(num_seqs: int, channels: int) -> Shape:
    """Choose more threads for a channel the fewer channels all sequences have (measured on an H200)."""
    work = num_seqs * channels
    if work <= 8192:
        return Shape(2 if work <= 4096 else 4, 4, 32)
    return Shape(4, 4) if work < 24576 else Shape(8, 2)


def takes(x: Tensor, b: Tensor) -> bool:
    """Whether the kernel exists for ``x [T, C]`` and ``b [T, N]`` or ``[T, H, N]``: on compute capability 9, for states
    of 16 and heads of whole blocks of channels."""
    return runs_gluon(x.device) and b.shape[-1] == _N.value and x.shape[1] % (32 * heads_of(b)) == 0


def launch_selective_scan(
    x: Tensor, z: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: ScanWeights, state: Tensor, out: Tensor,
    batch: Batch, shape: Shape | None = None,
) -> None:  # fmt: skip
    """Compute ``selective_scan`` into ``out [T, C]``, for inputs that the kernel ``takes``.

    ``shape`` overrides the choice (tests and measurements).
    """
    chunks, (num_rows, channels), heads = batch.chunk_table, x.shape, heads_of(b)
    # A captured graph does not know how many sequences there will be; short latency is for the case of one.
    shape = shape or choose_shape(1 if batch.mixed is not None else chunks.max_seqs, channels)
    assert channels // heads % shape.channels == 0, "a block of channels must belong to one head"
    _selective_scan_gluon_kernel[(channels // shape.channels, chunks.max_seqs)](
        x, z, dt, b, c, *weights, state, out,
        *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1, x.stride(0), z.stride(0), dt.stride(0),
        C=channels, HEADS=heads, SHAPE=shape, num_warps=shape.warps, **early_launch(x.device),
    )  # fmt: skip
