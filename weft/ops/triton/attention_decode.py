"""Paged attention of sequences with one query token, split over the keys.

Job: the decode kernel and the merge of its splits. Owns: the size of a split, tile shapes, grids. Does not know:
layers, or who filled the pages.

The query heads that share a key head stand together as rows of one tile, so each key is read once per group. Keys are
cut into splits of one of two sizes; a second kernel merges the splits' partial results by their log-sum-exp
(Flash-Decoding). A row's result depends on no other row, and on their number only in that it chooses the tile and, for
wide page tables, the size of splits, hence the order of sums. Partial results take ``num_seqs * max_splits * Hq * (D +
1)`` floats.

A split is computed in steps, by a pipeline of loads and products, or whole: few short sequences leave the device idle,
and all keys but the newest, which earlier steps wrote, can load while the kernels before this one still run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.triton.attention_tiles import (
    LOG2E,
    METADATA,
    Tile,
    accumulate,
    check_layout,
    load_keys_values,
    precision,
)
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_SHORT_SPLIT, _LONG_SPLIT = 256, 1024
_SHORT_TABLE, _SHORT_SPLITS = 32768, 16384
"""Page tables of up to so many tokens have short splits, and wider ones where sequences times splits are no more than
the second number: more would need much workspace."""

_FEW_PROGRAMS, _MANY_PROGRAMS = 2048, 8192
"""Programs that the decode grid aims at, for few and for many sequences: idle ones cost more where few work."""

_MIXTURE_PROGRAMS, _MIXTURE_MERGES = 1024, 32
"""Programs of the decode kernel, and sequences that are merged at once, in a graph that may hold no decode at all."""

_FEW_SEQUENCES = 64
"""Below so many sequences times key heads the decode kernel waits for memory more than it moves data."""

_HELD_WORK, _HELD_SPLITS, _HELD_TABLE, _HELD_HEAD = 16 * 128, 16, 16384, 256
"""Up to so many sequences times key heads times their size, sequences of up to so many splits take one program per
split, which loads all its keys at once: nothing else would move meanwhile. In longer ones a pipeline moves more, with
fewer warps than these programs have: where page tables hold more tokens, all sequences take that. So do heads of more
than the last number: the keys of a split would not fit in shared memory."""

_MANY_SEQUENCES = 256
"""Sequences times key heads that fill the device without being split."""


class Fixed(NamedTuple):
    """What the decode kernel is compiled for.

    Attributes:
        head_dim, group, num_heads, page_size: of the model; so many query heads share a key head.
        split: tokens of a split.
        rows, keys, block_d: of a tile.
        precision: of products of float32 operands.
        stages, ahead, held_splits: see ``Tile``.
        splits_last: the grid's last dimension goes over splits, else over sequences.
        mixture: which sequences decode is known to the device only.
    """

    head_dim: int
    group: int
    num_heads: int
    page_size: int
    split: int
    rows: int
    keys: int
    block_d: int
    precision: str
    stages: int
    ahead: bool
    held_splits: int
    splits_last: bool
    mixture: bool


@triton.jit
def _store_split(softmax, results, place, lanes, FIXED: tl.constexpr):
    """The result of a sequence's only split, or one split's part of it."""
    acc, row_sum, row_max = softmax
    out, partial, partial_lse, max_splits, stride_out = results
    row, seq, split, num_splits = place
    head_ids, dims, in_group, mask = lanes
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    acc = acc / row_sum[:, None]
    if num_splits == 1:
        offsets = head_ids[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + row.to(tl.int64) * stride_out + offsets, acc.to(out.dtype.element_ty), mask=mask)
    else:
        at = (seq.to(tl.int64) * max_splits + split) * FIXED.num_heads + head_ids
        tl.store(partial_lse + at, row_max + tl.log2(row_sum), mask=in_group)
        tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)


@triton.jit
def _decode_held_split(
    q_row, cache, results, place, lanes, inside, kv_len, scale_log2, FIXED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One split in one step. Its keys and values were written before this step, but for the newest token's: they load
    while the kernel before this one still runs."""
    SPLIT: tl.constexpr = FIXED.split
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    PRECISION: tl.constexpr = FIXED.precision
    table = cache[2]
    _row, _seq, split, num_splits = place
    head_ids, dims, _in_group, mask = lanes
    BLOCK_D: tl.constexpr = FIXED.block_d
    newest = kv_len - 1
    tokens = split * SPLIT + tl.arange(0, SPLIT)
    stored = tokens < newest
    page = tl.load(table + tokens // PAGE_SIZE, mask=stored, other=0)
    k, v = load_keys_values(cache, page, tokens, stored, dims, FIXED, True)
    wait(EARLY)
    queries = tl.load(q_row + inside, mask=mask, other=0.0)
    acc = tl.zeros([head_ids.shape[0], BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([head_ids.shape[0]], dtype=tl.float32)
    row_max = tl.full([head_ids.shape[0]], float("-inf"), dtype=tl.float32)
    if split == num_splits - 1:
        tail = newest + tl.arange(0, 16)  # as many as a matrix product takes
        is_newest = tail == newest
        tail_page = tl.load(table + tail // PAGE_SIZE, mask=is_newest, other=0)
        tail_k, tail_v = load_keys_values(cache, tail_page, tail, is_newest, dims, FIXED, True)
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, tail_k, tail_v, is_newest[None, :], scale_log2, PRECISION, True
        )
    acc, row_sum, row_max = accumulate(
        acc, row_sum, row_max, queries, k, v, stored[None, :], scale_log2, PRECISION, True
    )  # fmt: skip
    _store_split((acc, row_sum, row_max), results, place, lanes, FIXED)


@triton.jit
def _decode_sequence(
    inputs, strides, results, scale_log2, kv_head, seq, first_split, step, FIXED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Every ``step``-th split of one sequence and key head, if the sequence has one query token.

    With EARLY this is where the program waits for the kernels before it; one without a split leaves at once.
    """
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q = inputs
    stride_q, stride_slot, stride_table = strides
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    GROUP: tl.constexpr = FIXED.group
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    SPLIT: tl.constexpr = FIXED.split
    ROWS: tl.constexpr = FIXED.rows
    KEYS: tl.constexpr = FIXED.keys
    BLOCK_D: tl.constexpr = FIXED.block_d
    PRECISION: tl.constexpr = FIXED.precision
    STAGES: tl.constexpr = FIXED.stages
    AHEAD: tl.constexpr = FIXED.ahead
    HELD_SPLITS: tl.constexpr = FIXED.held_splits
    row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row
    kv_len = tl.load(seq_lens + seq)
    head_ids = kv_head * GROUP + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    in_group = tl.arange(0, ROWS) < GROUP
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    inside = head_ids[:, None] * HEAD_DIM + dims[None, :]
    q_row = q + row.to(tl.int64) * stride_q
    table = page_table + seq.to(tl.int64) * stride_table
    cache = (k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table, stride_slot)
    lanes = (head_ids, dims, in_group, mask)
    if query_len == 1:
        num_splits = tl.cdiv(kv_len, SPLIT)
        if first_split < num_splits:
            if HELD_SPLITS > 0:  # noqa: SIM102 (known to the compiler)
                if num_splits <= HELD_SPLITS:
                    place = (row, seq, first_split, num_splits)
                    _decode_held_split(q_row, cache, results, place, lanes, inside, kv_len, scale_log2, FIXED, EARLY)
            if num_splits > HELD_SPLITS:
                wait(EARLY)
                queries = tl.load(q_row + inside, mask=mask, other=0.0)
                for split in range(first_split, num_splits, step):
                    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
                    row_sum = tl.zeros([ROWS], dtype=tl.float32)
                    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
                    end = tl.minimum(kv_len, split * SPLIT + SPLIT)
                    ahead = split * SPLIT + tl.arange(0, KEYS)
                    next_page = tl.load(table + ahead // PAGE_SIZE, mask=AHEAD & (ahead < end), other=0)
                    for start in tl.range(split * SPLIT, end, KEYS, num_stages=STAGES):
                        tokens = start + tl.arange(0, KEYS)
                        valid = tokens < end
                        if AHEAD:
                            page = next_page
                            ahead = tokens + KEYS
                            next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)
                        else:
                            page = tl.load(table + tokens // PAGE_SIZE, mask=valid, other=0)
                        k, v = load_keys_values(cache, page, tokens, valid, dims, FIXED, True)
                        acc, row_sum, row_max = accumulate(
                            acc, row_sum, row_max, queries, k, v, valid[None, :], scale_log2, PRECISION, True
                        )
                    _store_split((acc, row_sum, row_max), results, (row, seq, split, num_splits), lanes, FIXED)
    else:
        wait(EARLY)


@jit(do_not_specialize=["num_rows", "num_seqs", "max_splits", "stride_table"], do_not_specialize_on_alignment=METADATA)
def _decode_kernel(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, partial, partial_lse, counts,
    scale_log2, num_rows, num_seqs, max_splits, stride_q, stride_out, stride_slot, stride_table,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    kv_head = tl.program_id(0)
    inputs = (q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q)
    strides = (stride_q, stride_slot, stride_table)
    results = (out, partial, partial_lse, max_splits, stride_out)
    if FIXED.mixture:
        wait(EARLY)
        # The programs are distributed over the sequences that decode; prefills and padding rows are the other kernel's.
        num_decodes = tl.load(counts + 2)
        if num_decodes > 0:
            step = tl.maximum(1, tl.num_programs(1) // num_decodes)
            first_split = tl.program_id(1) % step
            seqs_at_once = tl.num_programs(1) // step
            first_seq = tl.program_id(1) // step
            if first_seq < seqs_at_once:
                seq = first_seq
                while seq < num_decodes:
                    _decode_sequence(
                        inputs, strides, results, scale_log2, kv_head, seq, first_split, step, FIXED, False
                    )  # fmt: skip
                    seq += seqs_at_once
    else:
        if FIXED.splits_last:
            seq = tl.program_id(1)
            first_split = tl.program_id(2)
            step = tl.num_programs(2)
        else:
            first_split = tl.program_id(1)
            seq = tl.program_id(2)
            step = tl.num_programs(1)
        if (seq >= tl.load(cu_seqlens_q + num_seqs)) & (seq < num_rows) & (first_split == 0):
            wait(EARLY)
            ROWS: tl.constexpr = FIXED.rows
            BLOCK_D: tl.constexpr = FIXED.block_d
            dims = tl.arange(0, BLOCK_D)
            heads = tl.arange(0, ROWS)
            offsets = (kv_head * FIXED.group + heads)[:, None] * FIXED.head_dim + dims[None, :]
            zeros = tl.zeros([ROWS, BLOCK_D], dtype=out.dtype.element_ty)
            mask = (heads < FIXED.group)[:, None] & (dims < FIXED.head_dim)[None, :]
            tl.store(out + seq.to(tl.int64) * stride_out + offsets, zeros, mask=mask)
        _decode_sequence(inputs, strides, results, scale_log2, kv_head, seq, first_split, step, FIXED, EARLY)


@triton.jit
def _merge(
    out, partial, partial_lse, seq_lens, cu_seqlens_q, max_splits, stride_out, head, seq,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The splits of one sequence and query head, in order, if it decodes and has several."""
    row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row
    kv_len = tl.load(seq_lens + seq)
    num_splits = tl.cdiv(kv_len, SPLIT)
    if (query_len == 1) & (num_splits > 1):
        dims = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        weight_sum = 0.0
        largest = float("-inf")
        for start in range(0, num_splits, SPLITS):
            splits = start + tl.arange(0, SPLITS)
            valid = splits < num_splits
            place = (seq.to(tl.int64) * max_splits + splits) * NUM_HEADS + head
            lse = tl.load(partial_lse + place, mask=valid, other=float("-inf"))
            mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
            values = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            new_largest = tl.maximum(largest, tl.max(lse, 0))
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(lse - new_largest)
            acc = acc * shrink + tl.sum(values * weights[:, None], 0)
            weight_sum = weight_sum * shrink + tl.sum(weights, 0)
            largest = new_largest
        result = (acc / weight_sum).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * stride_out + head * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@jit(
    do_not_specialize=["num_seqs", "max_splits"], do_not_specialize_on_alignment=["seq_lens", "cu_seqlens_q", "counts"]
)
def _merge_kernel(
    out, partial, partial_lse, seq_lens, cu_seqlens_q, counts, num_seqs, max_splits, stride_out,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    MIXTURE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY, 64)  # more programs stand behind an attention that fills the GPU: what followed would start unevenly
    if MIXTURE:
        num_seqs = tl.load(counts + 2)
    seq = tl.program_id(1)
    while seq < num_seqs:
        _merge(
            out, partial, partial_lse, seq_lens, cu_seqlens_q, max_splits, stride_out, tl.program_id(0), seq,
            HEAD_DIM, NUM_HEADS, SPLIT, SPLITS, BLOCK_D,
        )  # fmt: skip
        seq += tl.num_programs(1)


def split_size(table_tokens: int, num_seqs: int) -> int:
    """Tokens per split of the decode kernel, for a page table that holds so many tokens of each sequence."""
    is_short = table_tokens <= _SHORT_TABLE or num_seqs * cdiv(table_tokens, _SHORT_SPLIT) <= _SHORT_SPLITS
    return _SHORT_SPLIT if is_short else _LONG_SPLIT


def decode_tile(
    num_seqs: int, num_kv_heads: int, head_dim: int, group: int, element_size: int, table_tokens: int
) -> Tile:
    """Tile of the decode kernel: up to 32 KiB of keys, and as much of values, per stage."""
    keys = max(16, min(64, 32768 // (next_power_of_2(head_dim) * element_size)))
    rows, work = max(16, next_power_of_2(group)), num_seqs * num_kv_heads
    if element_size == 4:
        return Tile(rows, keys, warps=4, stages=2, ahead=False)
    if work * head_dim <= _HELD_WORK and table_tokens <= _HELD_TABLE and head_dim <= _HELD_HEAD:
        return Tile(rows, keys, warps=8, stages=3, ahead=True, held_splits=_HELD_SPLITS)
    if work < _FEW_SEQUENCES:
        return Tile(rows, keys, warps=4, stages=3, ahead=True)
    if head_dim <= 128:  # a third stage fits beside a second program; in between, more and smaller programs pay
        return Tile(rows, 32, 2, 3, True) if work <= _MANY_SEQUENCES else Tile(rows, keys, 4, 3, False)
    return Tile(rows, keys, warps=4, stages=2, ahead=False)


def launch_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor, tile: Tile,
    *, split: int | None = None, aim: int | None = None,
) -> None:  # fmt: skip
    """Sequences with one query token, and padding rows below the number of sequences, with a given tile."""
    check_layout(q, k_cache, v_cache, out)
    num_rows, num_heads, head_dim = q.shape
    num_seqs, (_, page_size, num_kv_heads, _) = batch.seq_lens.shape[0], k_cache.shape
    table_tokens = batch.page_table.shape[1] * page_size
    split = split_size(table_tokens, num_seqs) if split is None else split
    max_splits = max(1, cdiv(table_tokens, split))
    splits_last = num_seqs * num_kv_heads <= _MANY_SEQUENCES
    aim = (_FEW_PROGRAMS if splits_last else _MANY_PROGRAMS) if aim is None else aim
    programs = min(max_splits, next_power_of_2(cdiv(aim, num_seqs * num_kv_heads)))
    mixture = batch.mixture
    counts = batch.seq_lens if mixture is None else mixture.counts
    merges = max_splits > 1
    shape = (num_seqs, max_splits, num_heads) if merges else (1, 1, 1)
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
        head_dim, num_heads // num_kv_heads, num_heads, page_size, split, tile.rows, tile.keys, block_d, precision(q),
        tile.stages, tile.ahead, held_splits, splits_last, mixture is not None,
    )  # fmt: skip
    _decode_kernel[grid](
        q, k_cache, v_cache, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, out, partial, partial_lse,
        counts, scale * LOG2E, num_rows, num_seqs, max_splits,
        q.stride(0), out.stride(0), num_kv_heads * head_dim, batch.page_table.stride(0),
        FIXED=fixed, num_warps=tile.warps, **early_launch(q.device),
    )  # fmt: skip
    if merges:
        at_once = num_seqs if mixture is None else min(num_seqs, _MIXTURE_MERGES)
        _merge_kernel[(num_heads, at_once)](
            out, partial, partial_lse, batch.seq_lens, batch.cu_seqlens_q, counts, num_seqs, max_splits, out.stride(0),
            HEAD_DIM=head_dim, NUM_HEADS=num_heads, SPLIT=split, SPLITS=16, BLOCK_D=block_d,
            MIXTURE=mixture is not None, num_warps=2, **early_launch(q.device),
        )  # fmt: skip
