"""Paged attention of sequences with several query tokens, for Hopper: copies, products and softmax at the same time.

Job: what ``prefill.py`` does, in Gluon, the part of Triton in which a program's warps get different work.
Owns: its tile shapes, and who waits for whom. Does not know: layers, who filled the pages, when it is the faster one.

A program has rows (``row = token * group + head``) of one sequence and key head. Its warps form three parts:

- *the producer* (``prefill_producer_hopper.py``) fills a ring of stages with tiles of keys and values; over an FP8
  cache it widens them to float16, which holds all e4m3 numbers;
- *two consumers*, four warps each, multiply on the matrix units and compute the online softmax.

Each consumer has 64 rows of its own, or as many of them as whole tokens fill (60 for groups of six). If that makes too
few programs, both consumers have the same rows, and every other tile of the keys. At the end the second writes its sums
to shared memory, and the first adds them to its own.

The schedule is that of FlashAttention-3 (arXiv 2407.08608). A consumer starts the scores of tile j, then the product of
the values of tile j - 1, and computes the softmax of tile j while that product runs. For heads of up to 128 the
consumers also take turns at the matrix units (ping-pong): one multiplies while the other computes its softmax.

Who waits for whom, by barriers (``ready`` and ``empty`` exist per stage, for keys and for values)::

    ready   the copy engine, when a tile has arrived, or the  ->  the consumers that read it
            producer, when a tile is widened
    empty   these consumers, when their product has been read ->  the producer
    turns   the other consumer, when its products are queued  ->  a consumer, before it queues its own
    merged  the second consumer, when its sums are stored     ->  the first, if they share rows

A barrier counts phases: ``wait(barrier, n & 1)`` waits for the end of phase n; on a new barrier, a wait for the phase
before the first returns at once.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.ops.attention import AttentionCall
from weft.ops.attention.hopper_tiles import (
    merge_consumers,
    place_of_block,
    row_offsets,
    softmax,
    start_scores,
    start_values,
    wait_tile,
    zero_unwritten,
)
from weft.ops.attention.prefill_producer_hopper import NARROW, produce
from weft.ops.attention.prefill_splits_hopper import merge_parts, own_part, share_of_block, store_part
from weft.ops.attention.tiles import METADATA, check_layout, prefilled
from weft.ops.fp8 import E4M3
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.gluon import thread_barrier
from weft.ops.triton.hopper import BOX, GluonKernel, hold, runs_gluon
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2

_ROWS = 64
"""Rows of a consumer: four warps multiply that many at a time."""

_SHARED_HEADS, _SHARED_HEAD = 128 * MULTIPROCESSORS * 3 // 4, 128
"""Consumers share their rows up to so many heads of query tokens, if heads have so many elements at most. With 1,024
tokens of Qwen3-0.6B, where each has rows of its own and nearly every multiprocessor a program, that is slower."""

_LOWEST = gl.constexpr(-(2.0**100))
"""Initial maximum of a row, below all scores, because a row may see none of a consumer's keys. The value is finite, so
that differences are numbers. As a power of two it is scaled without rounding; a fused multiply-subtract would leave the
error."""

_SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

_ALL_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)
_WIDENED_REGISTERS = gl.constexpr(232)
_WIDENER_REGISTERS = gl.constexpr(40)
"""Per thread: at the start all three parts have a third of 64 K; then the producer gives up most of its share, less
where it widens tiles."""


@gluon.jit
def _steps(
    first, last, acc, p, row_max, row_sum, queries, k_tiles, v_tiles, barriers, positions, scale_log2,
    WHICH: gl.constexpr, STEP: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of every ``STEP``-th tile from ``first`` to ``last - 1``, and the values of the tile before
    each."""
    k_ready, k_empty, v_ready, v_empty, turns, _merged = barriers
    offsets = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    for j in range(first, last, STEP):
        stage = j % STAGES
        before = (j - STEP) % STAGES
        wait_tile(k_ready, j, STAGES)
        if HEAD_DIM <= 128:
            mbarrier.wait(turns.index(WHICH), (j // STEP & 1) ^ (1 - WHICH))
        products = start_scores(queries, k_tiles.index(stage), KEYS, HEAD_DIM, SCORES)
        wait_tile(v_ready, j - STEP, STAGES)
        acc = start_values(acc, p, v_tiles.index(before), KEYS, V_DIM, OUT)
        if HEAD_DIM <= 128:
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(1, deps=(products,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            scores = gl.where((j * KEYS + offsets)[None, :] <= positions[:, None], scores, float("-inf"))
        p, row_max, row_sum, shrink = softmax(scores, row_max, row_sum, scale_log2)
        # Nothing tells the assembler that products take long, and it would wait for the values before the softmax: so
        # the wait depends on the sums, which stay before it.
        row_sum = hold(row_sum)
        acc, row_sum = warpgroup_mma_wait(0, deps=(acc, row_sum))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    return acc, p, row_max, row_sum


@gluon.jit
def _attend(
    queries, k_tiles, v_tiles, barriers, position, keys, sinks, part, scale_log2, WHICH: gl.constexpr,
    SHARED: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Attention of 64 rows, the first at ``position``, over the consumer's share of ``keys`` keys, at least 1: values
    summed by weights, in layout ``OUT``, largest scores, and sums of weights. ``sinks``: of the group's heads."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    STEP: gl.constexpr = 2 if SHARED else 1
    START: gl.constexpr = WHICH if SHARED else 0
    LOWEST: gl.constexpr = _LOWEST if SHARED or SPLIT else float("-inf")
    k_ready, k_empty, v_ready, _v_empty, turns, _merged = barriers
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    positions = position + lanes // GROUP
    wait_tile(k_ready, START, STAGES)
    if HEAD_DIM <= 128:
        mbarrier.wait(turns.index(WHICH), 1 - WHICH)
    products = start_scores(queries, k_tiles.index(START), KEYS, HEAD_DIM, SCORES)
    if HEAD_DIM <= 128:
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores = warpgroup_mma_wait(0, deps=(products,))
    mbarrier.arrive(k_empty.index(START), count=1)
    offsets = START * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    scores = gl.where(offsets[None, :] <= positions[:, None], scores, float("-inf"))
    row_max = gl.full([64], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
    row_sum = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    if SINKS and START == 0:  # a key whose value is zero
        score = gl.load(sinks + lanes % GROUP).to(gl.float32) * (LOG2_E / scale_log2)
        row_max = gl.where(part == 0, score, row_max)
        row_sum = row_sum + 1.0  # nothing beside a key, where the maximum is the lowest
    p, row_max, row_sum, _shrink = softmax(scores, row_max, row_sum, scale_log2)
    acc = gl.full([64, V_DIM], 0.0, gl.float32, layout=OUT)
    tiles = (keys + KEYS - 1) // KEYS
    whole = gl.minimum((position + 1) // KEYS, tiles)  # tiles that every row sees whole
    acc, p, row_max, row_sum = _steps(
        START + STEP, whole, acc, p, row_max, row_sum, queries, k_tiles, v_tiles, barriers, positions, scale_log2,
        WHICH, STEP, KEYS, HEAD_DIM, V_DIM, STAGES, False, SCORES, OUT,
    )  # fmt: skip
    partial = gl.maximum(whole, START + STEP)
    partial += (partial - START) % STEP
    acc, p, row_max, row_sum = _steps(
        partial, tiles, acc, p, row_max, row_sum, queries, k_tiles, v_tiles, barriers, positions, scale_log2,
        WHICH, STEP, KEYS, HEAD_DIM, V_DIM, STAGES, True, SCORES, OUT,
    )  # fmt: skip
    last = tiles - 1 - (tiles - 1 - START) % STEP
    v_tile = v_tiles.index(last % STAGES)
    wait_tile(v_ready, last, STAGES)
    if last == tiles - 1:
        zero_unwritten(v_tile, keys, PAGE_SIZE, KEYS, V_DIM)
    acc = start_values(acc, p, v_tile, KEYS, V_DIM, OUT)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, gl.convert_layout(row_max, gl.SliceLayout(1, OUT)), gl.convert_layout(row_sum, gl.SliceLayout(1, OUT))


@gluon.jit
def _consume(
    q, sinks, v_scale, out, parts, q_tiles, k_tiles, v_tiles, sums, barriers, place, kv_head, stride_q, stride_out,
    scale_log2, WHICH: gl.constexpr, SHARED: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
    STAGES: gl.constexpr, SINKS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Consumer ``WHICH``: its 64 rows of a block, or, if ``SHARED``, its tiles of the block's 64 rows."""
    LANES: gl.constexpr = HEAD_DIM // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    VALUE: gl.constexpr = DIM if V_DIM == HEAD_DIM else V_DIM  # columns of a head's values
    V_LANES: gl.constexpr = V_DIM // 8
    V_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // V_LANES, V_LANES], [4, 1], [1, 0])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_DIM, 16])
    FIRST: gl.constexpr = 0 if SHARED else WHICH * (64 // GROUP)
    row, num_tokens, num_padding, position, keys = place
    if num_padding > 0:
        offsets, mask = row_offsets(row, num_padding, kv_head, stride_out, FIRST, GROUP, VALUE, V_DIM, V_COPY)
        gl.store(out + offsets, gl.full([64, V_DIM], 0.0, gl.bfloat16, layout=V_COPY), mask=mask)
    if keys > (KEYS if SHARED and WHICH == 1 else 0):
        offsets, mask = row_offsets(row, num_tokens, kv_head, stride_q, FIRST, GROUP, DIM, HEAD_DIM, COPY)
        queries = q_tiles.index(WHICH)
        queries.store(gl.load(q + offsets, mask=mask, other=0.0).to(queries.dtype))
        fence_async_shared()  # the matrix units read by another path than stores take
        thread_barrier()
        part = 0
        if SPLIT:
            part = parts[2]
        acc, row_max, row_sum = _attend(
            queries, k_tiles, v_tiles, barriers, position + FIRST, keys, sinks + kv_head * GROUP, part, scale_log2,
            WHICH, SHARED, SPLIT, GROUP, PAGE_SIZE, KEYS, HEAD_DIM, V_DIM, STAGES, SINKS, OUT,
        )  # fmt: skip
        if SHARED and WHICH == 1:
            sums[0].store(acc)
            sums[1].store(row_max)
            sums[2].store(row_sum)
            thread_barrier()
            mbarrier.arrive(barriers[5].index(0), count=1)
        else:
            if SHARED:  # noqa: SIM102 (known to the compiler)
                if keys > KEYS:
                    acc, row_max, row_sum = merge_consumers(acc, row_max, row_sum, sums, barriers[5], scale_log2, OUT)
            whole = num_tokens
            if SPLIT:
                store_part(
                    acc, row_max, row_sum, parts, num_tokens, scale_log2, SHARED, FIRST, GROUP, VALUE, V_DIM, OUT
                )
                whole = gl.where(parts[3] > 1, 0, num_tokens)  # rows that no other program has a part of
            offsets, mask = row_offsets(row, whole, kv_head, stride_out, FIRST, GROUP, VALUE, V_DIM, OUT)
            result = acc / row_sum[:, None]
            if SCALED:
                result *= gl.load(v_scale)
            gl.store(out + offsets, result.to(gl.bfloat16), mask=mask)


@functools.partial(
    GluonKernel,
    do_not_specialize=["num_rows", "num_seqs", "least_tokens", "programs", "stride_table"],
    do_not_specialize_on_alignment=METADATA,
)
def _prefill_hopper_kernel(
    q, k_source, v_source, page_table, seq_lens, cu_seqlens_q, sinks, v_scale, out, means, logs, counts,
    scale_log2, num_rows, num_seqs, least_tokens, programs, stride_q, stride_out, stride_table,
    DIM: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, SPLIT: gl.constexpr, SINKS: gl.constexpr,
    WIDENED: gl.constexpr, SCALED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """``DIM``: of a head; ``HEAD_DIM``: the same in a tile, 64, 128 or 256. What a tile has beyond are zeros in the
    queries, and in keys and values the next head's numbers, which meet these zeros or columns that nobody stores."""
    release(EARLY)
    kv_head = gl.program_id(0)
    TOKENS: gl.constexpr = (1 if SHARED else 2) * (64 // GROUP)
    block = gl.program_id(1)
    if SPLIT:
        block, part, most, _blocks = share_of_block(block, cu_seqlens_q, counts, num_rows, num_seqs, programs, TOKENS)
    place, table = place_of_block(
        block, page_table, seq_lens, cu_seqlens_q, counts, num_rows, num_seqs, least_tokens, stride_table,
        TOKENS,
    )  # fmt: skip
    parts = ()
    if SPLIT:
        place, table, num_parts = own_part(place, table, part, most, PAGE_SIZE, KEYS)
        parts = (means, logs, part, num_parts)  # type: ignore[assignment]
        if (place[4] <= 0) & (place[2] <= 0):  # nothing to do: free the multiprocessor for the kernel that merges
            if kv_head + gl.program_id(1) == 0:  # one waits for all that leave
                wait(EARLY)
            return
    OPERAND: gl.constexpr = gl.float16 if WIDENED else gl.bfloat16
    q_tiles = gl.allocate_shared_memory(OPERAND, [2, 64, HEAD_DIM], BOX)
    k_tiles = gl.allocate_shared_memory(OPERAND, [STAGES, KEYS * HEAD_DIM // 64, 64], BOX)
    v_tiles = gl.allocate_shared_memory(OPERAND, [STAGES, KEYS * V_DIM // 64, 64], BOX)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Every barrier here is used. Triton would give the memory of another one to the values that the parts receive.
    turns, merged, sums = (), (), ()
    if HEAD_DIM <= 128:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if SHARED:
        merged = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        sums = (  # type: ignore[assignment]
            gl.allocate_shared_memory(gl.float32, [64, V_DIM], _SUMS),
            gl.allocate_shared_memory(gl.float32, [64], _FLAT),
            gl.allocate_shared_memory(gl.float32, [64], _FLAT),
        )
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1 if SHARED else 2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1 if SHARED else 2)
    if HEAD_DIM <= 128:
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)
    if SHARED:
        mbarrier.init(merged.index(0), count=1)
    barriers = (k_ready, k_empty, v_ready, v_empty, turns, merged)
    narrow = ()
    if WIDENED:
        narrow = gl.allocate_shared_memory(gl.float8e4nv, [2, KEYS * HEAD_DIM // 64, 64], NARROW)
    wait(EARLY)  # the other parts' warps start when this one's have returned from it
    gl.warp_specialize(
        [
            (_consume, (q, sinks, v_scale, out, parts, q_tiles, k_tiles, v_tiles, sums, barriers, place, kv_head,
                        stride_q, stride_out, scale_log2, 0, SHARED, SPLIT, GROUP, PAGE_SIZE, KEYS, DIM, HEAD_DIM,
                        V_DIM, STAGES, SINKS, SCALED)),
            (_consume, (q, sinks, v_scale, out, parts, q_tiles, k_tiles, v_tiles, sums, barriers, place, kv_head,
                        stride_q, stride_out, scale_log2, 1, SHARED, SPLIT, GROUP, PAGE_SIZE, KEYS, DIM, HEAD_DIM,
                        V_DIM, STAGES, SINKS, SCALED)),
            (produce, (k_source, v_source, k_tiles, v_tiles, barriers, narrow, table, kv_head * DIM, place[4],
                       PAGE_SIZE, KEYS, DIM, HEAD_DIM, V_DIM, STAGES, WIDENED)),
        ],
        [4, 4 if WIDENED else 1],
        [_WIDENED_REGISTERS, _WIDENER_REGISTERS] if WIDENED else [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def _tiles(head_dim: int, is_shared: bool, is_widened: bool) -> tuple[int, int]:
    """Compute the keys of a tile and the number of stages that fit in shared memory. Consumers that share rows release
    a stage later, so they get more stages."""
    if is_shared:
        return 64, 4 if is_widened else 5
    return (128 if head_dim <= 128 else 64), 2


def shares_rows(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the consumers of a program share their rows."""
    num_rows, num_heads, head_dim = q.shape
    fits = head_dim <= _SHARED_HEAD and _tiles(head_dim, True, False)[0] % k_cache.shape[1] == 0
    return fits and num_rows * num_heads <= _SHARED_HEADS


def fills_blocks(group: int) -> bool:
    """Whether whole tokens fill all rows of a block."""
    return _ROWS % group == 0


def block_tokens(group: int) -> int:
    """Query tokens of a block, where each consumer has rows of its own."""
    return 2 * (_ROWS // group)


def takes(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the kernel supports these tensors.

    It runs on compute capability 9, for queries in bfloat16 over a cache in bfloat16 or e4m3. Heads have 48 to 256
    dimensions, a multiple of 16, and groups up to 64 heads. Pages divide a tile and are whole swizzles (8 rows).
    """
    (_, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    return (
        runs_gluon(q.device)
        and q.dtype == torch.bfloat16
        and k_cache.dtype in (torch.bfloat16, E4M3)
        and head_dim in range(48, 257, 16)
        and num_heads // num_kv_heads <= _ROWS
        and page_size % 8 == 0
        and _tiles(head_dim, False, False)[0] % page_size == 0
    )


def launch_prefill_hopper(call: AttentionCall, *, skip_decodes: bool, fixed: bool = False) -> None:
    """Sequences with more query tokens (all, unless ``skip_decodes``) and all padding rows, of tensors that the kernel
    ``takes``. The scale is positive. Values of heads of more than 128 may have 128 columns, in a cache in the queries'
    dtype. ``fixed``: the order of a row's sums does not depend on how many rows there are."""
    check_layout(call)
    q, k_cache, v_cache, batch, scale, out, sinks, v_scale, bias = call
    assert bias is None, "that kernel has no bias"
    (num_rows, num_heads, head_dim), v_dim = q.shape, v_cache.shape[3]
    num_seqs, (num_pages, page_size, num_kv_heads, _) = batch.seq_lens.shape[0], k_cache.shape
    group = num_heads // num_kv_heads
    is_shared = not fixed and shares_rows(q, k_cache)
    tokens = block_tokens(group) // (2 if is_shared else 1)
    # Sequences end in a broken block each, hence their number; the last one is for padding rows.
    blocks = num_rows // tokens + (num_seqs if batch.mixed is None else batch.mixed.max_prefills) + 1
    programs, means, logs = 1 if fixed else MULTIPROCESSORS // num_kv_heads, q, q
    splits = programs >= 2 * cdiv(num_rows, tokens)
    if splits:
        blocks = max(blocks, programs)
        means, logs = (q.new_empty(blocks, num_kv_heads, tokens * group, n, dtype=torch.float32) for n in (v_dim, 1))
    is_widened, tile_dim = k_cache.dtype == E4M3, max(64, next_power_of_2(head_dim))  # of whole boxes
    keys, stages = _tiles(head_dim, is_shared, is_widened)
    stages += v_dim < head_dim  # narrower values leave room for one more
    k_source, v_source = k_cache, v_cache
    if not is_widened:
        k_source, v_source = (
            TensorDescriptor(c, [num_pages * page_size, width], [width, 1], [page_size, 64], BOX.value)
            for c, width in ((k_cache, num_kv_heads * head_dim), (v_cache, num_kv_heads * v_dim))
        )
    tile_v_dim = tile_dim if v_dim == head_dim else v_dim
    counts, num_seqs, least_tokens = prefilled(batch, skip_decodes=skip_decodes)
    _prefill_hopper_kernel[(num_kv_heads, blocks)](
        q, k_source, v_source, batch.page_table, batch.seq_lens, batch.cu_seqlens_q,
        q if sinks is None else sinks, q if v_scale is None else v_scale, out, means, logs, counts,
        scale * LOG2_E.value, num_rows, num_seqs, least_tokens, programs, q.stride(0), out.stride(0),
        batch.page_table.stride(0),
        DIM=head_dim, HEAD_DIM=tile_dim, V_DIM=tile_v_dim, GROUP=group, PAGE_SIZE=page_size, KEYS=keys, STAGES=stages,
        SHARED=is_shared, SPLIT=splits, SINKS=sinks is not None, WIDENED=is_widened, SCALED=v_scale is not None,
        num_warps=4, maxnreg=_ALL_REGISTERS, **early_launch(q.device),
    )  # fmt: skip
    if splits:
        merge_parts(call, (means, logs), (counts, num_seqs, least_tokens), programs, (tile_v_dim, tokens, keys))
