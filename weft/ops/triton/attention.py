"""Paged attention kernels: flash-style prefill, and decode split over the keys.

Job: ``paged_attention`` on the GPU. Owns: tile shapes and the split of long sequences. Does not know: layers, or who
filled the pages.

The query heads that share a key head stand together as rows of one tile (``row = token * group + head``), so each key
is read once per group. Softmax is computed online (FlashAttention-2, arXiv 2307.08691) in base 2.

Sequences with one query token go to the decode kernel: their keys are cut into splits of a size that depends on the
width of the page table alone, so under one width a row's result does not depend on its neighbours; a second kernel
merges the splits' partial results by their log-sum-exp (Flash-Decoding). The partial results take
``num_seqs * max_splits * Hq * (D + 1)`` floats of workspace.

Graph-safe: grids depend on tensor shapes alone; which rows are real, and which sequences decode, is read on the device.
Only *whether* each kernel is launched depends on the batch's host fields (``max_query_len``, ``num_decodes``): a graph
captured with some decodes and some longer queries serves any batch of its size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch

_SHORT_SPLIT, _LONG_SPLIT = 256, 1024
_SHORT_TABLE = 32768
"""Page tables of up to so many tokens have short splits; longer ones would need much workspace."""

_FEW_PROGRAMS, _MANY_PROGRAMS = 2048, 8192
"""Programs that the decode grid aims at, for few and for many sequences: idle ones cost more where few work."""

_MIXTURE_PROGRAMS, _MIXTURE_MERGES = 1024, 32
"""Programs of the decode kernel, and sequences that are merged at once, in a graph that may hold no decode at all."""

_FEW_SEQUENCES = 64
"""Below so many sequences times key heads the decode kernel waits for memory more than it moves data."""

_MANY_SEQUENCES = 256
"""Sequences times key heads that fill the device without being split."""

_LONG_ROWS = 131072
"""From so many (token, head) rows on, larger tiles pay for heads of up to 128."""

_SHORT_ROWS = 24576
"""Below this many (token, head) rows, tiles of 128 rows would leave multiprocessors without work."""

_LOG2E = 1.4426950408889634

_METADATA = ["page_table", "seq_lens", "cu_seqlens_q", "counts"]
"""Slices of a step's packed buffer, so their alignment changes from step to step: no reason to compile again."""


class Tile(NamedTuple):
    """Rows (query token, head) and keys of one tile, warps and pipeline stages.

    ``ahead``: the decode kernel loads page ids a step before the keys that need them (shorter waits, more registers).
    """

    rows: int
    keys: int
    warps: int
    stages: int
    ahead: bool = True


@triton.jit
def _load_keys_values(
    k_cache, v_cache, page, tokens, valid, dims, stride_slot,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values of some tokens, in the given pages, of one key head: two ``[len(tokens), BLOCK_D]`` tiles."""
    offsets = (page.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE)[:, None] * stride_slot + dims[None, :]
    if MASKED:
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache + offsets, mask=mask, other=0.0)
        v = tl.load(v_cache + offsets, mask=mask, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(k_cache + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_cache + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_cache + offsets)
        v = tl.load(v_cache + offsets)
    return k, v


@triton.jit
def _accumulate(
    acc, row_sum, row_max, q, k, v, visible, scale_log2, PRECISION: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One step of the online softmax. Every row has seen a visible key by the end of the first step."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shrink = tl.exp2(row_max - new_max)
    p = tl.exp2(scores * scale_log2 - new_max[:, None])
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, row_sum, new_max


@triton.jit
def _decode_sequence(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, partial, partial_lse,
    scale_log2, max_splits, stride_q, stride_out, stride_slot, stride_table, kv_head, seq, first_split, step,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Every ``step``-th split of one sequence and key head, if the sequence has one query token."""
    row = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row
    kv_len = tl.load(seq_lens + seq)
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    head_ids = kv_head * GROUP + heads
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = head_ids[:, None] * HEAD_DIM + dims[None, :]
    if query_len == 1:
        num_splits = tl.cdiv(kv_len, SPLIT)
        if first_split < num_splits:
            queries = tl.load(q + row.to(tl.int64) * stride_q + offsets, mask=mask, other=0.0)
            table = page_table + seq.to(tl.int64) * stride_table
            k_head = k_cache + kv_head * HEAD_DIM
            v_head = v_cache + kv_head * HEAD_DIM
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
                    k, v = _load_keys_values(
                        k_head, v_head, page, tokens, valid, dims, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_D, True
                    )
                    acc, row_sum, row_max = _accumulate(
                        acc, row_sum, row_max, queries, k, v, valid[None, :], scale_log2, PRECISION, True
                    )
                acc = acc / row_sum[:, None]
                if num_splits == 1:
                    result = acc.to(out.dtype.element_ty)
                    tl.store(out + row.to(tl.int64) * stride_out + offsets, result, mask=mask)
                else:
                    place = (seq.to(tl.int64) * max_splits + split) * NUM_HEADS + head_ids
                    tl.store(partial_lse + place, row_max + tl.log2(row_sum), mask=heads < GROUP)
                    tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "max_splits", "stride_table"], do_not_specialize_on_alignment=_METADATA
)
def _decode_kernel(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, partial, partial_lse, counts,
    scale_log2, num_rows, num_seqs, max_splits,
    stride_q, stride_out, stride_slot, stride_table,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, SPLITS_LAST: tl.constexpr, AHEAD: tl.constexpr,
    MIXTURE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    if MIXTURE:
        # The programs are dealt out to as many sequences as decode; prefills and padding rows are the other kernel's.
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
                        q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, partial, partial_lse,
                        scale_log2, max_splits, stride_q, stride_out, stride_slot, stride_table, kv_head, seq, first_split, step,
                        HEAD_DIM, GROUP, NUM_HEADS, PAGE_SIZE, SPLIT, ROWS, KEYS, BLOCK_D, PRECISION, STAGES, AHEAD,
                    )  # fmt: skip
                    seq += seqs_at_once
    else:
        if SPLITS_LAST:
            seq = tl.program_id(1)
            first_split = tl.program_id(2)
            step = tl.num_programs(2)
        else:
            first_split = tl.program_id(1)
            seq = tl.program_id(2)
            step = tl.num_programs(1)
        if (seq >= tl.load(cu_seqlens_q + num_seqs)) & (seq < num_rows) & (first_split == 0):
            dims = tl.arange(0, BLOCK_D)
            heads = tl.arange(0, ROWS)
            offsets = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
            zeros = tl.zeros([ROWS, BLOCK_D], dtype=out.dtype.element_ty)
            mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            tl.store(out + seq.to(tl.int64) * stride_out + offsets, zeros, mask=mask)
        _decode_sequence(
            q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, partial, partial_lse,
            scale_log2, max_splits, stride_q, stride_out, stride_slot, stride_table, kv_head, seq, first_split, step,
            HEAD_DIM, GROUP, NUM_HEADS, PAGE_SIZE, SPLIT, ROWS, KEYS, BLOCK_D, PRECISION, STAGES, AHEAD,
        )  # fmt: skip


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


@triton.jit(
    do_not_specialize=["num_seqs", "max_splits"], do_not_specialize_on_alignment=["seq_lens", "cu_seqlens_q", "counts"]
)
def _merge_kernel(
    out, partial, partial_lse, seq_lens, cu_seqlens_q, counts, num_seqs, max_splits, stride_out,
    HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
    MIXTURE: tl.constexpr,
):  # fmt: skip
    if MIXTURE:
        num_seqs = tl.load(counts + 2)
    seq = tl.program_id(1)
    while seq < num_seqs:
        _merge(
            out, partial, partial_lse, seq_lens, cu_seqlens_q, max_splits, stride_out, tl.program_id(0), seq,
            HEAD_DIM, NUM_HEADS, SPLIT, SPLITS, BLOCK_D,
        )  # fmt: skip
        seq += tl.num_programs(1)


@triton.jit
def _sequence_of_block(cu_seqlens_q, block, first_seq, first_token, num_seqs, TOKENS: tl.constexpr):
    """The sequence that query block ``block`` belongs to: with sequences and tokens counted from the given first ones,
    sequence i starts at block ``cu[i] // TOKENS + i``."""
    low = first_seq
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if (tl.load(cu_seqlens_q + middle) - first_token) // TOKENS + middle - first_seq <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "stride_table"], do_not_specialize_on_alignment=_METADATA)
def _prefill_kernel(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out, counts,
    scale_log2, num_rows, num_seqs,
    stride_q, stride_out, stride_slot, stride_table,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SKIP_DECODES: tl.constexpr, MIXTURE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks of a sequence see most keys: they go first
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    head_offsets = (kv_head * GROUP + lanes % GROUP) * HEAD_DIM
    first_seq = 0
    first_token = 0
    if MIXTURE:  # decodes, one token each, are the other kernel's
        first_token = tl.load(counts + 2)
        first_seq = first_token
        num_seqs = tl.load(counts + 1)
    total = tl.load(cu_seqlens_q + num_seqs)
    beyond = block - ((total - first_token) // TOKENS + num_seqs - first_seq)
    if beyond >= 0:
        tokens = total + beyond * TOKENS + lanes // GROUP
        mask = ((lanes < TOKENS * GROUP) & (tokens < num_rows))[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = tokens.to(tl.int64)[:, None] * stride_out + head_offsets[:, None] + dims[None, :]
        tl.store(out + offsets, tl.zeros([ROWS, BLOCK_D], dtype=out.dtype.element_ty), mask=mask)
    else:
        seq = _sequence_of_block(cu_seqlens_q, block, first_seq, first_token, num_seqs, TOKENS)
        begin = tl.load(cu_seqlens_q + seq)
        query_len = tl.load(cu_seqlens_q + seq + 1) - begin
        first = (
            block - ((begin - first_token) // TOKENS + seq - first_seq)
        ) * TOKENS  # the block's first token, counted in this step's tokens
        wanted = first < query_len
        if SKIP_DECODES:
            wanted = wanted & (query_len > 1)
        if wanted:
            context_len = tl.load(seq_lens + seq) - query_len
            tokens = first + lanes // GROUP
            mask = ((lanes < TOKENS * GROUP) & (tokens < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
            rows = (begin + tokens).to(tl.int64)[:, None]
            offsets = head_offsets[:, None] + dims[None, :]
            queries = tl.load(q + rows * stride_q + offsets, mask=mask, other=0.0)
            acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
            row_sum = tl.zeros([ROWS], dtype=tl.float32)
            row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
            positions = context_len + tokens
            table = page_table + seq.to(tl.int64) * stride_table
            k_head = k_cache + kv_head * HEAD_DIM
            v_head = v_cache + kv_head * HEAD_DIM
            end = context_len + tl.minimum(first + TOKENS, query_len)
            common = (context_len + first + 1) // KEYS * KEYS  # keys that every row of the block sees
            ahead = tl.arange(0, KEYS)
            next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)
            for start in tl.range(0, common, KEYS, num_stages=STAGES):
                keys = start + tl.arange(0, KEYS)
                page = next_page
                ahead = keys + KEYS
                next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)
                k, v = _load_keys_values(
                    k_head, v_head, page, keys, keys < end, dims, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_D, False
                )
                acc, row_sum, row_max = _accumulate(
                    acc, row_sum, row_max, queries, k, v, None, scale_log2, PRECISION, False
                )
            for start in tl.range(common, end, KEYS, num_stages=1):
                keys = start + tl.arange(0, KEYS)
                page = tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0)
                k, v = _load_keys_values(
                    k_head, v_head, page, keys, keys < end, dims, stride_slot, HEAD_DIM, PAGE_SIZE, BLOCK_D, True
                )
                visible = keys[None, :] <= positions[:, None]
                acc, row_sum, row_max = _accumulate(
                    acc, row_sum, row_max, queries, k, v, visible, scale_log2, PRECISION, True
                )
            result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + rows * stride_out + offsets, result, mask=mask)


def split_size(table_tokens: int) -> int:
    """Tokens per split of the decode kernel, for a page table that holds so many tokens."""
    return _SHORT_SPLIT if table_tokens <= _SHORT_TABLE else _LONG_SPLIT


def decode_tile(num_seqs: int, num_kv_heads: int, head_dim: int, group: int, element_size: int) -> Tile:
    """Tile of the decode kernel: up to 32 KiB of keys, and as much of values, per stage."""
    keys = max(16, min(64, 32768 // (triton.next_power_of_2(head_dim) * element_size)))
    rows, work = max(16, triton.next_power_of_2(group)), num_seqs * num_kv_heads
    if element_size == 4:
        return Tile(rows, keys, warps=4, stages=2, ahead=False)
    if work < _FEW_SEQUENCES:
        return Tile(rows, keys, warps=4, stages=3, ahead=True)
    if head_dim <= 128:  # a third stage fits beside a second program; in between, more and smaller programs pay
        return Tile(rows, 32, 2, 3, True) if work <= _MANY_SEQUENCES else Tile(rows, keys, 4, 3, False)
    return Tile(rows, keys, warps=4, stages=2, ahead=False)


def prefill_tile(num_rows: int, num_heads: int, head_dim: int, group: int, element_size: int) -> Tile:
    """Tile of the prefill kernel. Rows hold at least one token of every head of the group."""
    at_least = triton.next_power_of_2(group)
    if element_size == 4:
        return Tile(rows=max(32, at_least), keys=32, warps=4, stages=1)
    if head_dim <= 128 and num_rows * num_heads >= _LONG_ROWS:
        return Tile(rows=max(128, at_least), keys=64, warps=8, stages=3)
    if head_dim <= 128:
        return Tile(rows=max(64, at_least), keys=64, warps=4, stages=3)
    if num_rows * num_heads < _SHORT_ROWS:
        return Tile(rows=max(64, at_least), keys=64, warps=4, stages=2)
    return Tile(rows=max(128, at_least), keys=64, warps=8, stages=2)


def paged_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """``paged_attention`` of ``weft/ops/attention.py``; float32 inputs keep float32 accuracy."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    num_rows, num_seqs = q.shape[0], batch.seq_lens.shape[0]
    only_decodes = batch.max_query_len == 1 and batch.mixture is None
    decodes = only_decodes or batch.num_decodes > 0 or batch.mixture is not None
    if decodes:
        _decode(q, k_cache, v_cache, batch, scale, out)
    if not only_decodes or num_rows > num_seqs:
        group = q.shape[1] // k_cache.shape[2]
        tile = prefill_tile(num_rows, q.shape[1], q.shape[2], group, q.element_size())
        launch_prefill(q, k_cache, v_cache, batch, scale, out, tile, skip_decodes=decodes)
    return out


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.dtype == v_cache.dtype == q.dtype
    assert q.stride(2) == out.stride(2) == 1 and q.stride(1) == out.stride(1) == q.shape[2]


def _precision(q: Tensor) -> str:
    """float32 operands are split in three tf32 parts, which keeps float32 accuracy on the matrix units."""
    return "tf32x3" if q.dtype == torch.float32 else "tf32"


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor) -> None:
    num_kv_heads = k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    tile = decode_tile(batch.seq_lens.shape[0], num_kv_heads, q.shape[2], group, q.element_size())
    launch_decode(q, k_cache, v_cache, batch, scale, out, tile)


def launch_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor, tile: Tile,
    *, split: int | None = None, aim: int | None = None,
) -> None:  # fmt: skip
    """Sequences with one query token, and padding rows below the number of sequences, with a given tile."""
    _check(q, k_cache, v_cache, out)
    num_rows, num_heads, head_dim = q.shape
    num_seqs, (_, page_size, num_kv_heads, _) = batch.seq_lens.shape[0], k_cache.shape
    table_tokens = batch.page_table.shape[1] * page_size
    split = split_size(table_tokens) if split is None else split
    max_splits = max(1, triton.cdiv(table_tokens, split))
    splits_last = num_seqs * num_kv_heads <= _MANY_SEQUENCES
    aim = (_FEW_PROGRAMS if splits_last else _MANY_PROGRAMS) if aim is None else aim
    programs = min(max_splits, triton.next_power_of_2(triton.cdiv(aim, num_seqs * num_kv_heads)))
    mixture = batch.mixture
    counts = batch.seq_lens if mixture is None else mixture.counts
    merges = max_splits > 1
    shape = (num_seqs, max_splits, num_heads) if merges else (1, 1, 1)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Few sequences: programs without a split come last, while others still work. Many: a sequence's splits together.
    grid = (num_kv_heads, num_seqs, programs) if splits_last else (num_kv_heads, programs, num_seqs)
    if mixture is not None:
        grid = (num_kv_heads, triton.cdiv(_MIXTURE_PROGRAMS, num_kv_heads), 1)
    _decode_kernel[grid](
        q, k_cache, v_cache, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, out, partial, partial_lse,
        counts, scale * _LOG2E, num_rows, num_seqs, max_splits,
        q.stride(0), out.stride(0), num_kv_heads * head_dim, batch.page_table.stride(0),
        HEAD_DIM=head_dim, GROUP=num_heads // num_kv_heads, NUM_HEADS=num_heads, PAGE_SIZE=page_size,
        SPLIT=split, ROWS=tile.rows, KEYS=tile.keys, BLOCK_D=block_d,
        PRECISION=_precision(q), STAGES=tile.stages, SPLITS_LAST=splits_last, AHEAD=tile.ahead,
        MIXTURE=mixture is not None, num_warps=tile.warps,
    )  # fmt: skip
    if merges:
        at_once = num_seqs if mixture is None else min(num_seqs, _MIXTURE_MERGES)
        _merge_kernel[(num_heads, at_once)](
            out, partial, partial_lse, batch.seq_lens, batch.cu_seqlens_q, counts, num_seqs, max_splits, out.stride(0),
            HEAD_DIM=head_dim, NUM_HEADS=num_heads, SPLIT=split, SPLITS=16, BLOCK_D=block_d,
            MIXTURE=mixture is not None, num_warps=4,
        )  # fmt: skip


def launch_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float, out: Tensor, tile: Tile,
    *, skip_decodes: bool,
) -> None:  # fmt: skip
    """Sequences with more query tokens (all, unless ``skip_decodes``) and all padding rows, with a given tile."""
    _check(q, k_cache, v_cache, out)
    num_rows, num_heads, head_dim = q.shape
    num_seqs, (_, page_size, num_kv_heads, _) = batch.seq_lens.shape[0], k_cache.shape
    group = num_heads // num_kv_heads
    tokens = tile.rows // group
    mixture = batch.mixture
    # Sequences end in a broken block each, hence their number; the last one is for padding rows.
    blocks = num_rows // tokens + (num_seqs if mixture is None else mixture.max_prefills) + 1
    _prefill_kernel[(num_kv_heads, blocks)](
        q, k_cache, v_cache, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, out,
        batch.seq_lens if mixture is None else mixture.counts, scale * _LOG2E, num_rows, num_seqs,
        q.stride(0), out.stride(0), num_kv_heads * head_dim, batch.page_table.stride(0),
        HEAD_DIM=head_dim, GROUP=group, PAGE_SIZE=page_size, TOKENS=tokens,
        ROWS=tile.rows, KEYS=tile.keys, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PRECISION=_precision(q), STAGES=tile.stages, SKIP_DECODES=skip_decodes and mixture is None,
        MIXTURE=mixture is not None, num_warps=tile.warps,
    )  # fmt: skip
