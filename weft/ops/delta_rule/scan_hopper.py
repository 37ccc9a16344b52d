"""The gated delta rule's walk through the chunks of a sequence, for Hopper, in Gluon.

Job: what the kernel of ``scan.py`` does, with the state transposed. Owns: its layouts in shared memory, and who waits
for whom. Does not know: the kernels before it, or when this kernel is faster.

All products of a chunk stand the other way round: ``S^T k^T``, ``right^T solve^T``, ``delta^T k``, ... The result of
one product is the left operand of the next, in the registers and the layout in which it was computed. Nothing between
two products goes through shared memory. The right operands are tiles as the copy engine (TMA) puts them there.

A program has one sequence and value head. Its *producer*, one warp, requests the tiles of the next chunks into a ring
of stages; each of its *consumers*, four warps, holds 64 columns of the state, ``[64, K]``, in float32 registers. Of the
barriers of a stage, ``ready`` ends a phase when a chunk's tiles have arrived, ``empty`` when all consumers have read
them.

The copy engine fetches 64 rows whatever a chunk's length: rows of another sequence, or padding, which may hold NaN, are
cleared before a product meets them.

Graph-safe: grids depend on padded sizes alone; sequences without chunks leave at once.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch, ChunkTable
from weft.ops.delta_rule.vectors import PreparedChunks
from weft.ops.triton.chunk_scan import METADATA, metadata
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import async_load, reinterpret, thread_barrier
from weft.ops.triton.hopper import BOX, GluonKernel, runs_gluon
from weft.ops.triton.sizes import MULTIPROCESSORS

_CHUNK = gl.constexpr(CHUNK_SIZE)
_K = gl.constexpr(128)
_COLUMNS = gl.constexpr(64)
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_SIZE, 16]))
_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_LINES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

_ALL_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(24)


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        num_k_heads, num_v_heads, head_v_dim: of the layer.
        lines: vectors of 64 numbers per chunk and head. consumers: of a program. stages: of the ring.
        per_channel: keys and queries are already scaled by decays per channel. Otherwise vectors scale their rows.
    """

    num_k_heads: int
    num_v_heads: int
    head_v_dim: int
    lines: int
    consumers: int
    stages: int
    per_channel: bool


@gluon.jit
def _fetch_rows(desc, row, column, tile, ready):
    """Order 64 rows of 128 channels, in two boxes."""
    for panel in gl.static_range(2):
        box = tile.slice(panel * _CHUNK, _CHUNK, dim=0)
        async_load(desc, [row, column + panel * 64], ready, box)


@gluon.jit
def _produce(descs, tiles, barriers, chunk_start, chunks, head, column, FIXED: gl.constexpr):
    """The producer: order each chunk's tiles, those needed first before the others, as soon as a stage is free."""
    q_desc, k_desc, v_desc, solve_desc, attention_desc, lines_desc = descs
    q_tiles, k_tiles, write_tiles, v_tiles, solve_tiles, attention_tiles, lines_tiles = tiles
    all_ready, all_empty = barriers
    STAGES: gl.constexpr = FIXED.stages
    CONSUMERS: gl.constexpr = FIXED.consumers
    LINES: gl.constexpr = FIXED.lines
    SQUARES: gl.constexpr = 6 + CONSUMERS + (2 if FIXED.per_channel else 0)  # tiles of 64 by 64
    key_column = (head // (FIXED.num_v_heads // FIXED.num_k_heads)) * _K
    value_column = head * FIXED.head_v_dim + column
    first, last = chunks
    for i in range(first, last):
        n = i - first
        stage = n % STAGES
        start = gl.load(chunk_start + i)
        row = i * FIXED.num_v_heads + head
        mbarrier.wait(all_empty.index(stage), (n // STAGES & 1) ^ 1)
        ready = all_ready.index(stage)
        mbarrier.expect(ready, SQUARES * (_CHUNK * 64 * 2) + LINES * (_CHUNK * 4))
        if FIXED.per_channel:
            _fetch_rows(k_desc, row * 3 * _CHUNK, 0, k_tiles.index(stage), ready)
        else:
            _fetch_rows(k_desc, start, key_column, k_tiles.index(stage), ready)
        async_load(lines_desc, [row * LINES, 0], ready, lines_tiles.index(stage))
        for part in gl.static_range(CONSUMERS):
            v_tile = v_tiles.index(stage * CONSUMERS + part)
            async_load(v_desc, [start, value_column + part * _COLUMNS], ready, v_tile)
        async_load(solve_desc, [row * _CHUNK, 0], ready, solve_tiles.index(stage))
        if FIXED.per_channel:
            _fetch_rows(q_desc, (row * 3 + 1) * _CHUNK, 0, q_tiles.index(stage), ready)
            _fetch_rows(k_desc, (row * 3 + 2) * _CHUNK, 0, write_tiles.index(stage), ready)
        else:
            _fetch_rows(q_desc, start, key_column, q_tiles.index(stage), ready)
        async_load(attention_desc, [row * _CHUNK, 0], ready, attention_tiles.index(stage))


@gluon.jit
def _vector(lines, i: gl.constexpr):
    """A number for each of the chunk's tokens, which are the columns of what stands transposed."""
    return lines.slice(i * _CHUNK, _CHUNK).load(gl.SliceLayout(0, _ACC))[None, :]


@gluon.jit
def _operand(x, LAYOUT: gl.constexpr):
    return gl.convert_layout(x.to(gl.bfloat16), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _clear_beyond(tile, length, ROWS: gl.constexpr):
    """Zero the rows from ``length`` on of each box of a tile. All consumers do this: the same bits."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _COPY)) % _CHUNK
    tile.store(gl.where((rows < length)[:, None], tile.load(_COPY), 0.0))


@gluon.jit
def _zero_rows(out, begin, end, columns, FIXED: gl.constexpr):
    """Zero some columns of the rows ``begin`` to ``end``."""
    inside = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPY))
    zeros = gl.full([_CHUNK, _COLUMNS], 0.0, gl.bfloat16, layout=_COPY)
    for row in range(begin, end, _CHUNK):
        rows = row + inside
        offsets = rows.to(gl.int64) * (FIXED.num_v_heads * FIXED.head_v_dim)
        gl.store(out + offsets[:, None] + columns[None, :], zeros, mask=(rows < end)[:, None])


@gluon.jit
def _scalars(i, last, vectors, chunk_start, chunk_length, checkpoint_slot, head, FIXED: gl.constexpr):
    """Start, length and checkpoint slot of chunk ``i``, and its whole decay, which tokens share where channels do."""
    there = i < last
    start = gl.load(chunk_start + i, mask=there, other=0).to(gl.int64)
    length = gl.load(chunk_length + i, mask=there, other=0)
    slot = gl.load(checkpoint_slot + i, mask=there, other=0).to(gl.int64)
    line = (i * FIXED.num_v_heads + head).to(gl.int64) * FIXED.lines + 3
    decay = 0.0
    if not FIXED.per_channel:
        decay = gl.load(vectors + line * _CHUNK, mask=there, other=0.0)
    return start, length, slot, decay


@gluon.jit
def _store_outputs(p_out, b_out, tile, length):
    """Store a chunk's outputs, which stand transposed, through a tile in shared memory."""
    rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPY))
    tile.permute((1, 0)).store(b_out.to(gl.bfloat16))
    thread_barrier()
    gl.store(p_out, tile.load(_COPY), mask=(rows < length)[:, None])


@gluon.jit
def _consume(
    out, state, vectors, tiles, out_tiles, barriers, metadata, chunks, padding, own_slot, continues, head, column,
    WHICH: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Consumer ``WHICH``: 64 columns of the state, transposed, through the chunks in order."""
    q_tiles, k_tiles, write_tiles, v_tiles, solve_tiles, attention_tiles, lines_tiles = tiles
    all_ready, all_empty = barriers
    chunk_start, chunk_length, checkpoint_slot = metadata
    HV: gl.constexpr = FIXED.num_v_heads
    V: gl.constexpr = FIXED.head_v_dim
    first, last = chunks
    column = column + WHICH * _COLUMNS
    columns = head * V + column + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, _COPY))
    _zero_rows(out, padding[0], padding[1], columns, FIXED)
    _zero_rows(out, 0, padding[2], columns, FIXED)
    if first < last:
        o_v = (column + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(1, _STATE))).to(gl.int64)
        o_k = gl.arange(0, _K, layout=gl.SliceLayout(0, _STATE)).to(gl.int64)
        inside = o_v[:, None] + o_k[None, :] * V
        p_state = state + (own_slot * HV + head) * (_K * V)
        b_state = gl.full([_COLUMNS, _K], 0.0, gl.float32, layout=_STATE)
        if continues:
            b_state = gl.load(p_state + inside).to(gl.float32)
        zeros = gl.full([_COLUMNS, _CHUNK], 0.0, gl.float32, layout=_ACC)
        rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPY))
        outputs = rows[:, None] * (HV * V) + columns[None, :]
        out_tile = out_tiles.index(WHICH)
        start, length, slot, decay = _scalars(
            first, last, vectors, chunk_start, chunk_length, checkpoint_slot, head, FIXED
        )  # fmt: skip
        b_out, done, done_length = zeros, start * 0, length * 0  # other values than start's, or done is not carried
        for i in range(first, last):
            n = i - first
            stage = n % FIXED.stages
            later = _scalars(i + 1, last, vectors, chunk_start, chunk_length, checkpoint_slot, head, FIXED)
            mbarrier.wait(all_ready.index(stage), n // FIXED.stages & 1)
            v_tile = v_tiles.index(stage * FIXED.consumers + WHICH)
            if length < _CHUNK:
                if not FIXED.per_channel:
                    _clear_beyond(k_tiles.index(stage), length, 2 * _CHUNK)
                    _clear_beyond(q_tiles.index(stage), length, 2 * _CHUNK)
                _clear_beyond(v_tile, length, _CHUNK)
                fence_async_shared()  # the matrix units read by another path than stores take
                thread_barrier()
            k = reinterpret(k_tiles.index(stage), gl.bfloat16, [_CHUNK, _K], BOX)
            q = reinterpret(q_tiles.index(stage), gl.bfloat16, [_CHUNK, _K], BOX)
            lines = reinterpret(lines_tiles.index(stage), gl.float32, [FIXED.lines * _CHUNK], _FLAT)
            old = _operand(b_state, _ACC)
            from_k = hopper.warpgroup_mma(old, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            # Outputs of the chunk before, meanwhile; without a wait here the assembler would wait for all products.
            b_out = warpgroup_mma_wait(1, deps=(b_out,))
            _store_outputs(out + done * (HV * V) + outputs, b_out, out_tile, done_length)
            from_q = hopper.warpgroup_mma(old, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_v = v_tile.permute((1, 0)).load(_ACC).to(gl.float32)
            from_k = warpgroup_mma_wait(1, deps=(from_k,))
            if FIXED.per_channel:
                right = (b_v - from_k) * _vector(lines, 0)
            else:
                right = (b_v - from_k * _vector(lines, 0)) * _vector(lines, 4)
            solve = solve_tiles.index(stage).permute((1, 0))
            delta = hopper.warpgroup_mma(_operand(right, _ACC), solve, right, is_async=True)
            if FIXED.per_channel:
                decays = lines.slice(2 * _CHUNK, _K).load(gl.SliceLayout(0, _STATE))
                b_state = b_state * decays[None, :]
            else:
                b_state = b_state * decay
            delta, from_q = warpgroup_mma_wait(0, deps=(delta, from_q))
            if FIXED.per_channel:
                write = reinterpret(write_tiles.index(stage), gl.bfloat16, [_CHUNK, _K], BOX)
                b_state = hopper.warpgroup_mma(_operand(delta, _STATE), write, b_state, is_async=True)
                b_out = from_q + delta * _vector(lines, 1)
            else:
                b_state = hopper.warpgroup_mma(_operand(delta * _vector(lines, 2), _STATE), k, b_state, is_async=True)
                b_out = from_q * _vector(lines, 1) + delta * _vector(lines, 5)
            attention = attention_tiles.index(stage).permute((1, 0))
            b_out = hopper.warpgroup_mma(_operand(delta, _ACC), attention, b_out, is_async=True)
            b_state, b_out = warpgroup_mma_wait(0, deps=(b_state, b_out))
            mbarrier.arrive(all_empty.index(stage), count=1)
            if slot >= 0:
                gl.store(state + (slot * HV + head) * (_K * V) + inside, b_state.to(state.dtype.element_ty))
            done, done_length = start, length
            start, length, slot, decay = later
        _store_outputs(out + done * (HV * V) + outputs, b_out, out_tile, done_length)
        gl.store(p_state + inside, b_state.to(state.dtype.element_ty))


@gluon.jit
def _place(
    chunk_seq, chunk_start, first_chunk, cu_seqlens_q, seq_lens, state_slots, num_rows, num_seqs, FIXED: gl.constexpr
):
    """Find this program's chunks, the rows to zero (from, to, and how many before the first chunk), the sequence's
    slot, and whether the slot holds a state. See ``find_chunks``."""
    i_prefill = gl.program_id(2)
    num_chunks = gl.load(first_chunk + num_seqs)
    begin = 0
    end = 0
    before = 0
    if i_prefill == 0:
        begin = gl.load(cu_seqlens_q + num_seqs)
        end = num_rows
        before = begin
        if num_chunks > 0:
            before = gl.load(chunk_start)
    i_seq = gl.load(chunk_seq, mask=num_chunks > 0, other=0) + i_prefill  # decodes stand before the first one
    is_there = (num_chunks > 0) & (i_seq < num_seqs)
    first = gl.load(first_chunk + i_seq, mask=is_there, other=0)
    last = gl.load(first_chunk + i_seq + 1, mask=is_there, other=0)
    slot = gl.load(state_slots + i_seq, mask=is_there, other=0).to(gl.int64)
    length = gl.load(cu_seqlens_q + i_seq + 1, mask=is_there, other=0)
    length = length - gl.load(cu_seqlens_q + i_seq, mask=is_there, other=0)
    continues = gl.load(seq_lens + i_seq, mask=is_there, other=0) != length
    return (first, last), (begin, end, before), slot, continues


@functools.partial(GluonKernel, do_not_specialize=["num_rows", "num_seqs"], do_not_specialize_on_alignment=METADATA)
def _scan_hopper_kernel(
    q_desc, k_desc, v_desc, solve_desc, attention_desc, lines_desc, vectors, out, state,
    chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk, cu_seqlens_q, seq_lens, state_slots,
    num_rows, num_seqs, FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    enter(EARLY)  # the other parts' warps start when this one's have returned from it
    STAGES: gl.constexpr = FIXED.stages
    CONSUMERS: gl.constexpr = FIXED.consumers
    head = gl.program_id(1)
    column = gl.program_id(0) * (CONSUMERS * _COLUMNS)
    chunks, padding, slot, continues = _place(
        chunk_seq, chunk_start, first_chunk, cu_seqlens_q, seq_lens, state_slots, num_rows, num_seqs, FIXED
    )
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * _CHUNK, 64], BOX)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * _CHUNK, 64], BOX)
    write_tiles = k_tiles
    if FIXED.per_channel:
        write_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * _CHUNK, 64], BOX)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CONSUMERS, _CHUNK, 64], BOX)
    solve_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _CHUNK, 64], BOX)
    attention_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _CHUNK, 64], BOX)
    lines_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, FIXED.lines, _CHUNK], _LINES)
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, _CHUNK, 64], BOX)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    barriers = (ready, empty)
    tiles = (q_tiles, k_tiles, write_tiles, v_tiles, solve_tiles, attention_tiles, lines_tiles)
    descs = (q_desc, k_desc, v_desc, solve_desc, attention_desc, lines_desc)
    metadata = (chunk_start, chunk_length, checkpoint_slot)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (out, state, vectors, tiles, out_tiles, barriers, metadata, chunks, padding, slot, continues,
                            head, column, 0, FIXED)),
                (_consume, (out, state, vectors, tiles, out_tiles, barriers, metadata, chunks, padding, slot, continues,
                            head, column, 1, FIXED)),
                (_produce, (descs, tiles, barriers, chunk_start, chunks, head, column, FIXED)),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (out, state, vectors, tiles, out_tiles, barriers, metadata, chunks, padding, slot, continues,
                            head, column, 0, FIXED)),
                (_produce, (descs, tiles, barriers, chunk_start, chunks, head, column, FIXED)),
            ],
            [1],
            [_PRODUCER_REGISTERS],
        )  # fmt: skip


def takes(*inputs: Tensor) -> bool:
    """Whether the kernel exists for these keys, queries and values ``[T, heads, 128]``: on compute capability 9, in
    bfloat16, with rows that the copy engine can address."""
    return runs_gluon(inputs[0].device) and all(
        x.dtype == torch.bfloat16 and x.shape[2] == _K.value and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        for x in inputs
    )


def launch_delta_scan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: Tensor, prepared: PreparedChunks, batch: Batch,
    *, consumers: int | None = None,
) -> None:  # fmt: skip
    """Compute outputs and states from prepared chunks, for values that the kernel ``takes``.

    Args:
        q, k, v, out, state, prepared, batch: see ``scan_chunks``; K and V are 128. With ``keys`` the vectors are viewed
            as ``[chunks, HV, 4, 64]``.
        consumers: 1 or 2, overrides the choice (tests and measurements).
    """
    chunks: ChunkTable = batch.chunk_table
    solve, attention, vectors, keys = prepared
    num_rows, num_heads, head_v_dim = v.shape
    num_squares, num_lines = solve.shape[0] * num_heads, vectors.shape[2]
    num_seqs = 1 if batch.mixed is not None else chunks.max_seqs
    consumers = consumers or (2 if num_seqs * num_heads * 2 > MULTIPROCESSORS else 1)

    def rows_of(x: Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [64, 64], BOX.value)

    def squares(x: Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, [num_squares * CHUNK_SIZE, 64], [64, 1], [64, 64], BOX.value)

    lines = TensorDescriptor(vectors, [num_squares * num_lines, 64], [64, 1], [num_lines, 64], _LINES.value)
    q_desc, k_desc = rows_of(q), rows_of(k)
    if keys is not None:
        q_desc = k_desc = TensorDescriptor(keys, [num_squares * 3 * CHUNK_SIZE, 128], [128, 1], [64, 64], BOX.value)
    stages = 3 if keys is None else 2
    fixed = Fixed(k.shape[1], num_heads, head_v_dim, num_lines, consumers, stages, keys is not None)
    _scan_hopper_kernel[(head_v_dim // (_COLUMNS.value * consumers), num_heads, chunks.max_seqs)](
        q_desc, k_desc, rows_of(v), squares(solve), squares(attention), lines, vectors, out, state,
        *metadata(batch, chunks), num_rows, chunks.first.shape[0] - 1,
        FIXED=fixed, num_warps=4, maxnreg=_ALL_REGISTERS, **early_launch(q.device),
    )  # fmt: skip
