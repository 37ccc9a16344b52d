"""Chunks of Kimi Delta Attention for the scan, for Hopper, in Gluon: decays as products instead of sums.

Job: what the first kernel of ``kda_prefill.py`` does, in bfloat16 with heads of 128. Owns: its layouts. Does not know:
the inverse and the scan behind it.

The levels are those of ``kda_prefill.py``: pairs of tokens in neighbouring halves of a block. A pair's decay has two
factors: from its first token to the end of the first half, and from there to its second token. Both are products of the
decays ``a`` of single tokens, which never exceed 1. So a chunk needs one exponential for each number of g and no
difference of sums. A product too small for float32 is zero.

Eight warps have a chunk of 64 tokens and a head, each of them a *group* of 8 consecutive tokens. A thread has four
channels of all tokens of its group. These rows are a tuple, so that products over tokens are products of registers.
Groups tell one another their whole decays. Keys and queries of length 1 stay in shared memory. Each level stores keys
and queries, times their decays, in a tile that has first halves before second halves. So one product ``[64, 128]
[128, 32]`` of slices has what the level needs: keys and queries of second halves with keys of first halves. Meanwhile
the threads compute the decays of the next level.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from weft.config.chunks import CHUNK_SIZE
from weft.config.gated_delta_net import L2_EPS
from weft.forward_context import ChunkTable
from weft.ops.triton.chunk_scan import METADATA
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.gluon import thread_barrier
from weft.ops.triton.hopper import BOX, GluonKernel, runs_gluon

_CHUNK = gl.constexpr(CHUNK_SIZE)
_HALF = gl.constexpr(CHUNK_SIZE // 2)
_K = gl.constexpr(128)
_GROUPS = gl.constexpr(8)
_ROWS = gl.constexpr(CHUNK_SIZE // 8)
"""Tokens of a group, which one warp has."""
_LEVELS = gl.constexpr(CHUNK_SIZE.bit_length() - 1)
_EPS = gl.constexpr(L2_EPS)
_LOG2_E = gl.constexpr(LOG2_E.value)
_REGISTERS = 128
"""A thread has so many, so that two programs share a multiprocessor."""

_ROW = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
"""``[8, 128]``: one row of each group."""
_STACK = gl.constexpr(gl.BlockedLayout([8, 4], [1, 32], [8, 1], [1, 0]))
"""``[64, 128]``: all rows, in the same threads."""
_TOKENS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
"""``[64, 128]`` as it is loaded, and ``[64, 64]`` as zeros are stored."""
_PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16]))
"""``[64, 32]``: products of pairs of tokens."""
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_SCALE = gl.constexpr(128**-0.5)


@gluon.jit
def times_half(x, factor):
    """``x * factor`` in float16, of a float16 and a float32 tensor; two numbers at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 f; cvt.rn.f16x2.f32 f, $3, $2; mul.rn.f16x2 $0, $1, f; }",
        "=r,r,f,f", [x, factor], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _stack(rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """``COUNT`` rows in one tensor, with a dimension of 2 for each bit of the row, the highest one last."""
    stacked = rows[FIRST]
    if COUNT > 1:
        HALF: gl.constexpr = COUNT // 2
        stacked = gl.join(_stack(rows, FIRST, HALF), _stack(rows, FIRST + HALF, HALF))
    return stacked


@gluon.jit
def _all_rows(rows):
    """``[64, 128]`` of the rows of all groups."""
    stacked = gl.permute(_stack(rows, 0, _ROWS), (0, 4, 3, 2, 1))
    return gl.convert_layout(gl.reshape(stacked, [_CHUNK, _K]), _STACK)


@gluon.jit
def _unstack(x, COUNT: gl.constexpr):
    """The rows of a tensor with a dimension of 2 for each bit of the row, the highest one last."""
    if COUNT == 1:
        return (gl.convert_layout(x, _ROW),)
    else:  # noqa: RET505 (known to the compiler)
        low, high = gl.split(x)
        return _unstack(low, COUNT // 2) + _unstack(high, COUNT // 2)


@gluon.jit
def _rows_of(x):
    """The rows of ``[64, 128]``."""
    return _unstack(gl.permute(gl.reshape(x, [_GROUPS, 2, 2, 2, _K]), (0, 4, 3, 2, 1)), _ROWS)


@gluon.jit
def _from(a, decay, BEGIN: gl.constexpr, COUNT: gl.constexpr):
    """The decays of each of ``COUNT`` rows and of those between it and ``BEGIN``, times ``decay``."""
    decays = ()
    for r in gl.static_range(BEGIN, BEGIN + COUNT):
        decay = decay * a[r]
        decays = decays + (decay,)  # type: ignore[assignment]  # noqa: RUF005 (kernels cannot unpack)
    return decays


@gluon.jit
def _to(a, decay, BEGIN: gl.constexpr, COUNT: gl.constexpr):
    """The decays behind each of ``COUNT`` rows, times ``decay``."""
    decays = ()
    for r in gl.static_range(COUNT):
        decays = (decay,) + decays  # type: ignore[assignment]  # noqa: RUF005
        decay = decay * a[BEGIN + COUNT - 1 - r]
    return decays


@gluon.jit
def _total(totals, first, last):
    """The decay of the groups from ``first`` on, before ``last``."""
    decay = gl.full([_GROUPS, _K], 1.0, gl.float32, layout=_ROW)
    for group in gl.static_range(_GROUPS):
        inside = (first <= group) & (group < last)
        decay = decay * gl.where(inside, totals.slice(group, 1, dim=0).load(_ROW), 1.0)
    return decay


@gluon.jit
def _decays_of(LEVEL: gl.constexpr, a, group, totals):
    """Compute what keys and queries are multiplied by at a level."""
    ones = gl.full([_GROUPS, _K], 1.0, gl.float32, layout=_ROW)
    decays = ()
    SIZE: gl.constexpr = 1 << LEVEL
    if SIZE < _ROWS:
        for block in gl.static_range(_ROWS // (2 * SIZE)):
            decays = decays + _to(a, ones, 2 * block * SIZE, SIZE) + _from(a, ones, (2 * block + 1) * SIZE, SIZE)
    else:
        GROUPS: gl.constexpr = SIZE // _ROWS  # of a half
        boundary = group // (2 * GROUPS) * (2 * GROUPS) + GROUPS
        is_second, outside = group >= boundary, ones
        if GROUPS > 1:
            outside = _total(totals, gl.where(is_second, boundary, group + 1), gl.where(is_second, group, boundary))
        starts, ends = _from(a, outside, 0, _ROWS), _to(a, outside, 0, _ROWS)
        for r in gl.static_range(_ROWS):
            decays = decays + (gl.where(is_second, starts[r], ends[r]),)  # type: ignore[assignment]  # noqa: RUF005
    return decays


@gluon.jit
def _multiply(LEVEL: gl.constexpr, tiles, units, decays):
    """Queue a level's products ``[64, 32]``: keys, then queries of second halves with keys of first halves."""
    tile = tiles.index(LEVEL % 2)
    stacked = _all_rows(decays)
    both = gl.join(times_half(units.index(0).load(_STACK), stacked), times_half(units.index(1).load(_STACK), stacked))
    SIZE: gl.constexpr = 1 << LEVEL
    halves = gl.reshape(both, [_CHUNK // (2 * SIZE), 2, SIZE, _K, 2])
    tile.store(gl.reshape(gl.permute(halves, (1, 4, 0, 2, 3)), [2 * _CHUNK, _K]))
    fence_async_shared()  # the matrix units read by another path than stores take
    thread_barrier()
    zeros = gl.full([_CHUNK, _HALF], 0.0, gl.float32, layout=_PAIRS)
    first, second = tile.slice(0, _HALF, dim=0), tile.slice(_CHUNK, _CHUNK, dim=0)
    return hopper.warpgroup_mma(second, first.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _token(LEVEL: gl.constexpr, place, half: gl.constexpr):
    """The token at a place among those of one half at a level."""
    SIZE: gl.constexpr = 1 << LEVEL
    return place // SIZE * (2 * SIZE) + half * SIZE + place % SIZE


@gluon.jit
def _store_pairs(LEVEL: gl.constexpr, product, p_system, p_attention, p_beta, length, HEADS: gl.constexpr):
    """Store the products of a level's own pairs."""
    rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _PAIRS))
    columns = gl.arange(0, _HALF, layout=gl.SliceLayout(0, _PAIRS))[None, :]
    of_keys, place = rows < _HALF, rows % _HALF
    i = _token(LEVEL, place, 1)
    factor = gl.load(p_beta + i * HEADS, mask=of_keys & (i < length), other=0.0)
    factor = gl.where(of_keys, factor, _SCALE)
    product = warpgroup_mma_wait(0, deps=[product]) * factor[:, None]
    at = (i * _CHUNK)[:, None] + _token(LEVEL, columns, 0)
    if LEVEL > 0:  # two numbers are stored at once
        at = gl.max_contiguous(gl.multiple_of(at, [1, 2]), [1, 2])
    is_pair = (place // (1 << LEVEL))[:, None] == columns // (1 << LEVEL)
    gl.store(p_system + at, product.to(gl.float16), mask=is_pair & of_keys[:, None])
    gl.store(p_attention + at, product.to(gl.bfloat16), mask=is_pair & (rows >= _HALF)[:, None])


@gluon.jit
def _store_rows(p, units, decays, scale, which: gl.constexpr):
    """Keys or queries with their decays, where ``p`` points to."""
    rows = _rows_of(units.index(which).load(_STACK))
    for r in gl.static_range(_ROWS):
        gl.store(p + r * _K, (rows[r].to(gl.float32) * (decays[r] * scale)).to(gl.bfloat16))


@gluon.jit
def _normalise(k, q, units, p_own, start, length, stride_k, stride_q):
    """Store keys and queries of length 1 in shared memory, and what a token has with itself."""
    rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _TOKENS))
    columns = gl.arange(0, _K, layout=gl.SliceLayout(0, _TOKENS))
    inside = (rows < length)[:, None]
    at = rows[:, None]
    b_k = gl.load(k + start * stride_k + (at * stride_k + columns[None, :]), mask=inside, other=0.0).to(gl.float32)
    b_q = gl.load(q + start * stride_q + (at * stride_q + columns[None, :]), mask=inside, other=0.0).to(gl.float32)
    k_norm = gl.rsqrt(gl.sum(b_k * b_k, axis=1) + _EPS)
    q_norm = gl.rsqrt(gl.sum(b_q * b_q, axis=1) + _EPS)
    gl.store(p_own + rows, gl.sum(b_q * b_k, axis=1) * (q_norm * k_norm) * _SCALE)
    units.index(0).store((b_k * k_norm[:, None]).to(gl.float16))
    units.index(1).store((b_q * q_norm[:, None]).to(gl.float16))


@gluon.jit
def _store_zeros(p_system, p_attention):
    rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _TOKENS))[:, None]
    columns = gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, _TOKENS))[None, :]
    zeros = gl.full([_CHUNK, _CHUNK], 0.0, gl.float32, layout=_TOKENS)
    gl.store(p_system + (rows * _CHUNK + columns), zeros.to(gl.float16))
    gl.store(p_attention + (rows * _CHUNK + columns), zeros.to(gl.bfloat16))


@functools.partial(GluonKernel, do_not_specialize_on_alignment=METADATA)
def _prepare_hopper_kernel(
    q, k, g, beta, keys, system, attention, vectors, chunk_start, chunk_length, stride_q, stride_k,
    HEADS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One chunk and head."""
    enter(EARLY)
    i_chunk, i_head = gl.program_id(0), gl.program_id(1)
    length = gl.load(chunk_length + i_chunk)
    units = gl.allocate_shared_memory(gl.float16, [2, _CHUNK, _K], BOX)
    tiles = gl.allocate_shared_memory(gl.float16, [2, 2 * _CHUNK, _K], BOX)
    totals = gl.allocate_shared_memory(gl.float32, [_GROUPS, _K], _PLAIN)
    if length > 0:
        start = gl.load(chunk_start + i_chunk).to(gl.int64)
        tile = (i_chunk * HEADS + i_head).to(gl.int64)
        p_vectors = vectors + tile * (2 * _CHUNK + _K)
        p_system, p_attention = system + tile * (_CHUNK * _CHUNK), attention + tile * (_CHUNK * _CHUNK)
        p_beta = beta + start * HEADS + i_head
        group = gl.arange(0, _GROUPS, layout=gl.SliceLayout(1, _ROW))[:, None]
        channels = gl.arange(0, _K, layout=gl.SliceLayout(0, _ROW))[None, :]
        p_g = g + (start * HEADS + i_head) * _K + (group * (_ROWS * HEADS * _K) + channels)
        a = ()
        total = gl.full([_GROUPS, _K], 1.0, gl.float32, layout=_ROW)
        for r in gl.static_range(_ROWS):
            there = (group * _ROWS + r < length) & (channels >= 0)
            decay = gl.exp2(gl.load(p_g + r * (HEADS * _K), mask=there, other=0.0) * _LOG2_E)
            a = a + (decay,)  # type: ignore[assignment]  # noqa: RUF005
            total = total * decay
        totals.store(total)
        _store_zeros(p_system, p_attention)
        tokens = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _TOKENS))
        gl.store(p_vectors + tokens, gl.load(p_beta + tokens * HEADS, mask=tokens < length, other=0.0))
        _normalise(k + i_head * _K, q + i_head * _K, units, p_vectors + _CHUNK, start, length, stride_k, stride_q)
        thread_barrier()

        decays = _decays_of(0, a, group, totals)
        for level in gl.static_range(_LEVELS):
            product = _multiply(level, tiles, units, decays)
            if level + 1 < _LEVELS:
                decays = _decays_of(level + 1, a, group, totals)
            _store_pairs(level, product, p_system, p_attention, p_beta, length, HEADS)

        before, behind = _total(totals, 0, group), _total(totals, group + 1, _GROUPS)
        p_keys = keys + tile * (3 * _CHUNK * _K) + (group * (_ROWS * _K) + channels)
        from_start = _from(a, before, 0, _ROWS)
        is_last = (group == _GROUPS - 1) & (channels >= 0)
        gl.store(p_vectors + (2 * _CHUNK + channels + 0 * group), from_start[_ROWS - 1], mask=is_last)
        _store_rows(p_keys, units, from_start, 1.0, 0)
        _store_rows(p_keys + _CHUNK * _K, units, from_start, _SCALE, 1)
        _store_rows(p_keys + 2 * _CHUNK * _K, units, _to(a, behind, 0, _ROWS), 1.0, 0)


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel exists for these queries and keys ``[T, H, 128]``: in bfloat16, on compute capability 9."""
    return q.dtype == k.dtype == torch.bfloat16 and k.shape[2] == _K.value and runs_gluon(q.device)


def launch_prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: ChunkTable, outputs: tuple[Tensor, ...]
) -> None:
    """Compute keys, system, attention and vectors of ``prepare_channels`` for inputs that the kernel ``takes``."""
    num_heads = k.shape[1]
    _prepare_hopper_kernel[(chunks.start.shape[0], num_heads)](
        q, k, g, beta, *outputs, chunks.start, chunks.length, q.stride(0), k.stride(0),
        HEADS=num_heads, num_warps=8, maxnreg=_REGISTERS, **early_launch(q.device),
    )  # fmt: skip
