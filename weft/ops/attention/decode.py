"""Paged attention of sequences with one query token, or a few where drafts are verified, split over the keys.

Job: the decode kernel and the merge of its splits. Owns: the size of a split, tile shapes, grids. Does not know:
layers, or who filled the pages.

The query heads that share a key head are rows of one tile, with all of the sequence's query tokens, so each key is
read once per group. Keys are cut into splits of one of three sizes; a second kernel merges the splits' partial results
by their log-sum-exp (Flash-Decoding). A row's result does not depend on the values of other rows. The number of rows
chooses the tile and the size of splits, and so the order of sums. Partial results take ``num_seqs * max_splits * Hq *
(D + 1)`` floats.

A split is computed in steps, by a pipeline of loads and products. The keys of its first ones may be *held*: all but the
newest, which earlier steps wrote, can load into registers while the kernels before this one still run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.ops.attention import AttentionCall
from weft.ops.attention.merge import decode_programs, merge_kernel, most_splits, split_of
from weft.ops.attention.tiles import (
    METADATA,
    Tile,
    accumulate,
    accumulate_range,
    check_layout,
    first_pages,
    load_keys_values,
    start_softmax,
)
from weft.ops.triton.early_launch import Release, early_launch, release, release_by_work, wait
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision

if GLUON_IS_KNOWN:
    from weft.ops.attention import decode_hopper as hopper

_SPLIT = 256
_DOUBLE_WORK = 112 * 1024 * 128
"""Threshold on tokens of a sequence times sequences times key heads times head size. Beyond the threshold splits are
twice as long, beyond eight times the threshold four times as long. Fewer programs then fill the device, and each
program costs a start, an end and workspace."""

_HELD_PROGRAMS, _FEW_PROGRAMS, _MANY_PROGRAMS = 1024, 2048, 8192
"""Target numbers of programs of the decode grid: with held keys, for few sequences, for many sequences. Idle programs
cost more where few work. The first number is small so that the merge starts early."""

_MIXTURE_PROGRAMS, _MIXTURE_DECODES = 1024, 32
"""In a graph that may hold no decode at all: programs of the decode kernel, and the sequences that splits are made for
and that are merged at once."""

_FEW_SEQUENCES = 64
"""Sequences times key heads below which the decode kernel is bound by memory latency instead of bandwidth."""

_HELD_WORK, _HELD_SPLITS, _HELD_TABLE, HELD_HEAD = 16 * 128, 16, 16384, 256
"""Limits for programs that hold all keys of a split: sequences times key heads times head size, splits of a sequence,
tokens of the page table, head size. Within the limits no other data would move meanwhile. Longer sequences move more
data through a pipeline with fewer warps. Wider page tables use the pipeline for all sequences, and so do larger heads,
because the keys of a split would not fit in shared memory. With twice as many sequences half of a split is held, by
programs of which two fit a multiprocessor."""

_LOWEST = tl.constexpr(-1e30)
"""A maximum below all scores, of rows that may see none of a split's keys: finite, so that differences are numbers."""

_RELEASED_SEQUENCES = 64
"""Most sequences times key heads for which the merge may start while the decode kernel runs."""

MANY_SEQUENCES = 256
"""Sequences times key heads that fill the device without being split."""


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        head_dim, group, num_heads, page_size: of the model; so many query heads share a key head.
        query_len: query tokens of each sequence.
        split: tokens of the shortest splits.
        rows, keys, block_d: of a tile.
        precision: of products of float32 operands.
        stages, ahead, held_splits, held_keys: see ``Tile``.
        splits_last: the grid's last dimension goes over splits, else over sequences.
        mixture: which sequences decode is known to the device only.
        sinks: dimensions of the sinks: 1 by head, 2 by row and head, 0 without.
        scaled: results are multiplied by the scale of the values.
        extent: entries of the bias of a row, 0 without one.
    """

    head_dim: int
    group: int
    num_heads: int
    page_size: int
    query_len: int
    split: int
    rows: int
    keys: int
    block_d: int
    precision: str
    stages: int
    ahead: bool
    held_splits: int
    held_keys: int
    splits_last: bool
    mixture: bool
    sinks: int
    scaled: bool
    extent: int = 0


@triton.jit
def _store_split(softmax, results, place, lanes, FIXED: tl.constexpr):
    """The result of a sequence's only split, or one split's part of it."""
    acc, row_sum, row_max = softmax
    out, partial, partial_lse, v_scale, max_splits, stride_out = results
    row, seq, split, num_splits = place
    head_ids, tokens, dims, in_group, mask = lanes
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    if FIXED.query_len > 1:  # the last split may hold nothing that the first tokens see
        row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    acc = acc / row_sum[:, None]
    if FIXED.scaled:
        acc *= tl.load(v_scale)
    if num_splits == 1:
        offsets = tokens.to(tl.int64)[:, None] * stride_out + head_ids[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + row.to(tl.int64) * stride_out + offsets, acc.to(out.dtype.element_ty), mask=mask)
    else:
        at = (seq.to(tl.int64) * max_splits + split) * (FIXED.num_heads * FIXED.query_len)
        at += tokens * FIXED.num_heads + head_ids
        tl.store(partial_lse + at, row_max + tl.log2(row_sum), mask=in_group)
        tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)


@triton.jit
def _store_zeros(out, stride_out, row, kv_head, FIXED: tl.constexpr):
    ROWS: tl.constexpr = FIXED.rows
    BLOCK_D: tl.constexpr = FIXED.block_d
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, ROWS)
    offsets = (kv_head * FIXED.group + heads)[:, None] * FIXED.head_dim + dims[None, :]
    zeros = tl.zeros([ROWS, BLOCK_D], dtype=out.dtype.element_ty)
    mask = (heads < FIXED.group)[:, None] & (dims < FIXED.head_dim)[None, :]
    tl.store(out + row.to(tl.int64) * stride_out + offsets, zeros, mask=mask)


@triton.jit
def _decode_held_split(
    q_row, cache, sinks, results, place, lanes, inside, kv_len, scale_log2, FIXED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Compute one split. Its keys and values were written before this step, but for the newest tokens': the first
    ``held_keys`` load while the kernel before this one still runs."""
    SPLIT: tl.constexpr = FIXED.split
    HELD: tl.constexpr = FIXED.held_keys
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    PRECISION: tl.constexpr = FIXED.precision
    table = cache[2]
    _row, _seq, split, num_splits = place
    head_ids, query_tokens, dims, in_group, mask = lanes
    QUERY_LEN: tl.constexpr = FIXED.query_len
    LOWEST: tl.constexpr = _LOWEST if QUERY_LEN > 1 else float("-inf")
    newest = kv_len - QUERY_LEN
    tokens = split * SPLIT + tl.arange(0, HELD)
    stored = tokens < newest
    page = tl.load(table + tokens // PAGE_SIZE, mask=stored, other=0)
    k, v = load_keys_values(cache, page, tokens, stored, dims, FIXED, True)
    first = split * SPLIT + HELD
    end = tl.minimum(newest, split * SPLIT + SPLIT)
    next_page = first_pages(table, first, end, FIXED)
    wait(EARLY)
    queries = tl.load(q_row + inside, mask=mask, other=0.0)
    has_sink = in_group & (split == 0)
    acc, row_sum, row_max = start_softmax(sinks, head_ids, has_sink, FIXED.rows, FIXED.block_d, FIXED.sinks, LOWEST)
    if split == num_splits - 1:
        tail = newest + tl.arange(0, 16)  # as many as a matrix product takes
        is_newest = tail < kv_len
        tail_page = tl.load(table + tail // PAGE_SIZE, mask=is_newest, other=0)
        tail_k, tail_v = load_keys_values(cache, tail_page, tail, is_newest, dims, FIXED, True)
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, tail_k, tail_v, tail[None, :] <= (newest + query_tokens)[:, None],
            scale_log2, PRECISION, True,
        )  # fmt: skip
    acc, row_sum, row_max = accumulate(
        acc, row_sum, row_max, queries, k, v, stored[None, :], scale_log2, PRECISION, True
    )  # fmt: skip
    softmax = (acc, row_sum, row_max)
    if HELD < SPLIT:
        softmax = accumulate_range(
            softmax, queries, cache, next_page, first, end, newest + query_tokens, dims, scale_log2, FIXED
        )  # fmt: skip
    _store_split(softmax, results, place, lanes, FIXED)


@triton.jit
def _decode_sequence(
    inputs, strides, results, scale_log2, double_from, kv_head, seq, first_split, step,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every ``step``-th split of one sequence and key head, if the sequence has ``query_len`` query tokens.

    With EARLY this is where the program waits for the kernels before it; one without a split leaves at once.
    """
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks, bias = inputs
    stride_q, stride_slot, stride_table = strides
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    GROUP: tl.constexpr = FIXED.group
    ROWS: tl.constexpr = FIXED.rows
    BLOCK_D: tl.constexpr = FIXED.block_d
    HELD_SPLITS: tl.constexpr = FIXED.held_splits
    QUERY_LEN: tl.constexpr = FIXED.query_len
    LOWEST: tl.constexpr = _LOWEST if QUERY_LEN > 1 else float("-inf")
    row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row
    kv_len = tl.load(seq_lens + seq)
    head_ids = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
    query_tokens = tl.arange(0, ROWS) // GROUP
    dims = tl.arange(0, BLOCK_D)
    in_group = query_tokens < QUERY_LEN
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    inside = query_tokens.to(tl.int64)[:, None] * stride_q + head_ids[:, None] * HEAD_DIM + dims[None, :]
    q_row = q + row.to(tl.int64) * stride_q
    table = page_table + seq.to(tl.int64) * stride_table
    cache = (k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table, stride_slot)
    lanes = (head_ids, query_tokens, dims, in_group, mask)
    last_seen = kv_len - QUERY_LEN + query_tokens
    bias_rows = None
    if FIXED.extent > 0:
        p_bias = bias + ((row + query_tokens).to(tl.int64) * FIXED.num_heads + head_ids) * FIXED.extent
        bias_rows = (p_bias, tl.where(in_group, last_seen, -1))
    sink_places = head_ids
    if FIXED.sinks == 2:
        sink_places = (row + query_tokens).to(tl.int64) * FIXED.num_heads + head_ids
    if query_len == QUERY_LEN:
        split_tokens = split_of(kv_len, double_from, FIXED.split)
        num_splits = tl.cdiv(kv_len, split_tokens)
        if first_split < num_splits:
            if QUERY_LEN == 1:
                release_by_work(EARLY, tl.minimum(num_splits, step), step)
            is_held = (num_splits <= HELD_SPLITS) & (kv_len <= double_from)
            if HELD_SPLITS > 0:  # noqa: SIM102 (known to the compiler)
                if is_held:
                    place = (row, seq, first_split, num_splits)
                    _decode_held_split(
                        q_row, cache, sinks, results, place, lanes, inside, kv_len, scale_log2, FIXED, EARLY
                    )  # fmt: skip
            if not is_held:
                pages = first_pages(table, first_split * split_tokens, kv_len, FIXED)
                wait(EARLY)
                queries = tl.load(q_row + inside, mask=mask, other=0.0)
                for split in range(first_split, num_splits, step):
                    has_sink = in_group & (split == 0)
                    softmax = start_softmax(sinks, sink_places, has_sink, ROWS, BLOCK_D, FIXED.sinks, LOWEST)
                    first = split * split_tokens
                    end = tl.minimum(kv_len, first + split_tokens)
                    softmax = accumulate_range(
                        softmax, queries, cache, pages, first, end, last_seen, dims, scale_log2, FIXED, bias_rows
                    )  # fmt: skip
                    _store_split(softmax, results, (row, seq, split, num_splits), lanes, FIXED)
                    pages = first_pages(table, first + step * split_tokens, kv_len, FIXED)
    else:
        wait(EARLY)


@jit(
    do_not_specialize=["num_rows", "num_seqs", "max_splits", "double_from", "stride_table"],
    do_not_specialize_on_alignment=METADATA,
)
def _decode_kernel(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks, v_scale, out, partial, partial_lse, counts,
    scale_log2, num_rows, num_seqs, max_splits, double_from, stride_q, stride_out, stride_slot, stride_table,
    bias, FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    inputs = (q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks, bias)
    strides = (stride_q, stride_slot, stride_table)
    results = (out, partial, partial_lse, v_scale, max_splits, stride_out)
    decode_programs(
        _decode_sequence, _store_zeros, inputs, strides, results, counts, scale_log2, num_rows, num_seqs, double_from,
        FIXED, EARLY,
    )  # fmt: skip


def most_short_tokens(num_seqs: int, num_kv_heads: int, head_dim: int) -> int:
    """Tokens of the longest sequence that has the shortest splits, among so many."""
    return _DOUBLE_WORK // (num_seqs * num_kv_heads * head_dim)


def decode_tile(
    num_seqs: int, num_kv_heads: int, head_dim: int, num_rows: int, element_size: int, cache_size: int,
    table_tokens: int, *, small: bool = False,
) -> Tile:  # fmt: skip
    """Choose the tile of the decode kernel for ``num_rows`` rows (heads of a group times query tokens) and the bytes of
    an element of queries and of the cache. A stage holds up to 32 KiB of keys and as much of values. It holds half as
    much if several programs share a multiprocessor, or if a program has the least shared memory (``small``)."""
    rows, work = max(16, next_power_of_2(num_rows)), num_seqs * num_kv_heads
    if element_size == 4:
        keys = max(16, min(64, 8192 // next_power_of_2(head_dim)))
        return Tile(rows, keys, warps=4, stages=2, ahead=False)
    stage = 32768 if work < _FEW_SEQUENCES and not small else 16384
    keys = max(16, min(64, stage // (next_power_of_2(head_dim) * cache_size)))
    held_head = 128 if small else HELD_HEAD
    if work * head_dim <= _HELD_WORK and table_tokens <= _HELD_TABLE and head_dim <= held_head:
        return Tile(rows, keys, warps=8, stages=3, ahead=True, held_splits=_HELD_SPLITS, held_keys=_SPLIT)
    if work * head_dim <= 2 * _HELD_WORK and table_tokens <= _HELD_TABLE and head_dim <= 128:
        return Tile(rows, keys, warps=4, stages=2, ahead=True, held_splits=_HELD_SPLITS, held_keys=_SPLIT // 2)
    return Tile(rows, keys, warps=4, stages=3, ahead=True)


def decode_release(num_seqs: int, num_kv_heads: int, tile: Tile) -> Release:
    """When the decode kernels let the merge start, where every sequence has one query token: what was fastest in whole
    steps.

    Programs of the merge that wait beside attention take places from it: not before all of it runs, where two of its
    programs share a multiprocessor, nor beside many sequences.
    """
    if 0 < tile.held_keys < _SPLIT:
        return Release.AT_WAIT
    return Release.AT_END if num_seqs * num_kv_heads > _RELEASED_SEQUENCES else Release.BY_KERNEL


class DecodeChoice(NamedTuple):
    """How decode rows are computed.

    Attributes:
        tile: of the kernel.
        on_hopper: use the kernel of ``decode_hopper.py``.
        split: tokens of the shortest split.
        double_from, aim: override ``most_short_tokens`` and the number of programs (measurements).
    """

    tile: Tile
    on_hopper: bool = False
    split: int = _SPLIT
    double_from: int | None = None
    aim: int | None = None


def launch_decode(call: AttentionCall, choice: DecodeChoice, *, query_len: int = 1) -> None:
    """Attend from sequences with ``query_len`` query tokens each. With one, rows of padding below the number of
    sequences are computed as well."""
    tile, on_hopper, split, double_from, aim = choice
    assert not (call.has_row_terms and (on_hopper or tile.held_splits)), "that kernel has no terms of rows"
    check_layout(call)
    q, k_cache, v_cache, batch, scale, out, sinks, v_scale, bias = call
    num_rows, num_heads, head_dim = q.shape
    num_seqs, (_, page_size, num_kv_heads, _) = batch.seq_lens.shape[0], k_cache.shape
    table_tokens = batch.page_table.shape[1] * page_size
    decodes = num_seqs if batch.mixed is None else min(num_seqs, _MIXTURE_DECODES)
    double_from = most_short_tokens(decodes, num_kv_heads, head_dim) if double_from is None else double_from
    max_splits = most_splits(table_tokens, double_from, split)
    splits_last = batch.mixed is None and num_seqs * num_kv_heads <= MANY_SEQUENCES
    if aim is None:
        aim = _HELD_PROGRAMS if tile.held_splits else _FEW_PROGRAMS if splits_last else _MANY_PROGRAMS
    programs = min(max_splits, next_power_of_2(cdiv(aim, num_seqs * num_kv_heads)))
    mixture = batch.mixed
    is_decode = mixture is None and query_len == 1
    released = decode_release(num_seqs, num_kv_heads, tile) if is_decode else Release.BY_KERNEL
    counts = batch.seq_lens if mixture is None else mixture.counts
    merges = max_splits > 1
    shape = (num_seqs, max_splits, query_len * num_heads) if merges else (1, 1, 1)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = max(16, next_power_of_2(head_dim))
    # Few sequences: programs without a split come last, while others still work. Many: a sequence's splits together.
    grid = (num_kv_heads, num_seqs, programs) if splits_last else (num_kv_heads, programs, num_seqs)
    if mixture is not None:
        grid = (num_kv_heads, cdiv(_MIXTURE_PROGRAMS, num_kv_heads), 1)
    # Each split needs a program. No bound of the table's width otherwise: every width would be another kernel.
    held_splits = tile.held_splits if programs == max_splits else min(tile.held_splits, programs)
    if mixture is not None:
        held_splits = 0
    fixed = Fixed(
        head_dim, num_heads // num_kv_heads, num_heads, page_size, query_len, split, tile.rows, tile.keys, block_d,
        precision(q), tile.stages, tile.ahead, held_splits, tile.held_keys, splits_last, mixture is not None,
        0 if sinks is None else sinks.dim(), v_scale is not None, 0 if bias is None else bias.shape[2],
    )  # fmt: skip
    kernel = hopper.decode_hopper_kernel if on_hopper else _decode_kernel
    kernel[grid](
        q, k_cache, v_cache, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, q if sinks is None else sinks,
        q if v_scale is None else v_scale, out, partial, partial_lse, counts,
        scale * LOG2_E.value, num_rows, num_seqs, max_splits, double_from,
        q.stride(0), out.stride(0), num_kv_heads * head_dim, batch.page_table.stride(0),
        *(() if on_hopper else (bias,)),
        FIXED=fixed, num_warps=tile.warps, maxnreg=hopper.MAX_REGISTERS if on_hopper else None,
        **early_launch(q.device, released),
    )  # fmt: skip
    if merges:
        merge_kernel[(num_heads * query_len, decodes)](
            out, partial, partial_lse, batch.seq_lens, batch.cu_seqlens_q, counts, num_seqs, max_splits, double_from,
            out.stride(0),
            HEAD_DIM=head_dim, NUM_HEADS=num_heads, SPLIT=split, SPLITS=16, BLOCK_D=block_d,
            QUERY_LEN=query_len, MIXTURE=mixture is not None, num_warps=2, **early_launch(q.device),
        )  # fmt: skip
