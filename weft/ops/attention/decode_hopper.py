"""Paged decode attention over an FP8 cache, for Hopper: keys and values go from memory into the operands of products.

Job: what the kernel of ``decode.py`` does, in Gluon. Owns: the order of loads and products. Does not know:
layers, the size of a split, grids; ``decode_tiles_hopper.py`` knows which thread holds what.

A tile of e4m3 has half the bytes of a tile of bfloat16. The kernel of ``decode.py`` does not gain from this, because
values are widened before they are transposed, and move as bfloat16 through shared memory. These moves and their
barriers take longer than the loads. Here no tile passes through shared memory. Each warp has keys and an online softmax
of its own, and all warps' sums are added at the end of a split.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.ops.attention.decode_tiles_hopper import (
    HEAD_DIM,
    ROWS,
    WORDS,
    add_values,
    along,
    key_layout,
    load_queries,
    places_of,
    products_layout,
    scores_of,
    softmax,
    value_layout,
)
from weft.ops.attention.merge import decode_programs, split_of
from weft.ops.attention.tiles import METADATA, Tile
from weft.ops.fp8 import E4M3
from weft.ops.triton.early_launch import release, release_by_work, wait
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.hopper import GluonKernel, runs_gluon

_LOWEST = gl.constexpr(-1e30)
"""A maximum below all scores: finite, so that differences are numbers where a warp has no key of a split."""


def takes(q: Tensor, k_cache: Tensor, rows: int) -> bool:
    """Whether the kernel is made for these tensors, and so many query tokens times heads of a group."""
    _, page_size, _, head_dim = k_cache.shape
    is_fp8 = k_cache.dtype == E4M3 and q.dtype == torch.bfloat16
    fits = rows <= ROWS.value and head_dim == HEAD_DIM.value and page_size % 16 == 0
    return is_fp8 and fits and runs_gluon(q.device)


TILE, MAX_REGISTERS = Tile(ROWS.value, keys=64, warps=2, stages=1), 168
"""Registers per thread with which six programs fit a multiprocessor. With more warps each warp would have fewer keys of
a split, and start and end as often."""


@gluon.jit
def _load_page(table, start, end, places, FIXED: gl.constexpr):
    """Load the page id of each block of the tile that begins at ``start``."""
    first = start + places[0]
    return gl.load(table + first // FIXED.page_size, mask=first < end, other=0)


@gluon.jit
def _load(cache, page, start, end, places, FIXED: gl.constexpr):
    """Words of the tile's keys, or of every other one."""
    words, stride_word = cache
    blocks, keys, inside = places
    PAGE_SIZE: gl.constexpr = FIXED.page_size
    at = page.to(gl.int64) * (stride_word * PAGE_SIZE) + inside
    if PAGE_SIZE > 16:
        at = at + (start + blocks) % PAGE_SIZE * stride_word
    return gl.load(words + at, mask=start + keys < end, other=0)


@gluon.jit
def _load_values(cache, page, start, end, places, FIXED: gl.constexpr):
    """Load the words of the even keys and of the odd keys."""
    words, stride_word = cache
    even = _load(cache, page, start, end, places, FIXED)
    return even, _load((words + stride_word, stride_word), page, start, end - 1, places, FIXED)


@gluon.jit
def _load_tile(caches, table, start, end, places, FIXED: gl.constexpr):
    of_keys, of_values = places
    keys = _load(caches[0], _load_page(table, start, end, of_keys, FIXED), start, end, of_keys, FIXED)
    even, odd = _load_values(
        caches[1], _load_page(table, start, end, of_values, FIXED), start, end, of_values, FIXED
    )  # fmt: skip
    return keys, even, odd


@gluon.jit
def _store_split(softmax, results, sinks, place, FIXED: gl.constexpr, PRODUCTS: gl.constexpr):
    """All warps' sums as the result of a sequence's only split, or one split's part of it."""
    acc, row_sum, row_max = softmax
    out, partial, partial_lse, v_scale, max_splits, stride_out = results
    row, seq, kv_head, split, num_splits = place
    GROUP: gl.constexpr = FIXED.group
    OUT: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    in_group = rows < GROUP * FIXED.query_len
    heads = kv_head * GROUP + rows % GROUP
    tokens = rows // GROUP
    n = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, OUT))
    dims = (n % 8 * 16 + n // 8)[:, None]
    largest = gl.convert_layout(gl.max(row_max, 0), gl.SliceLayout(0, OUT))
    if FIXED.sinks:
        sink = gl.load(sinks + heads, mask=in_group & (split == 0), other=float("-inf")).to(gl.float32) * LOG2_E
        largest = gl.maximum(largest, sink)
    of_warps = gl.expand_dims(gl.convert_layout(largest, gl.SliceLayout(0, gl.SliceLayout(1, PRODUCTS))), 0)
    weights = gl.exp2(row_max - of_warps)
    total = gl.convert_layout(gl.sum(row_sum * weights, 0), gl.SliceLayout(0, OUT))
    if FIXED.sinks:
        total = total + gl.exp2(sink - largest)
    total = gl.where(total > 0.0, total, 1.0)  # the last split may hold nothing that the first tokens see
    result = gl.sum(acc * gl.expand_dims(weights, 1), 0) / total[None, :]
    if FIXED.scaled:
        result *= gl.load(v_scale)
    if num_splits == 1:
        at = (row + tokens).to(gl.int64) * stride_out + heads * HEAD_DIM
        gl.store(out + (at[None, :] + dims), result.to(out.dtype.element_ty), mask=in_group[None, :])
    else:
        at = (seq.to(gl.int64) * max_splits + split) * (FIXED.num_heads * FIXED.query_len)
        at = at + tokens * FIXED.num_heads + heads
        gl.store(partial_lse + at, largest + gl.log2(total), mask=in_group)
        gl.store(partial + (at[None, :] * HEAD_DIM + dims), result, mask=in_group[None, :])


@gluon.jit
def _store_zeros(out, stride_out, row, kv_head, FIXED: gl.constexpr):
    out_row = out + row.to(gl.int64) * stride_out
    SIZE: gl.constexpr = ROWS * HEAD_DIM
    LINE: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    ids = gl.arange(0, SIZE, layout=LINE)
    zeros = gl.full([SIZE], 0.0, out_row.dtype.element_ty, layout=LINE)
    heads = FIXED.group * HEAD_DIM
    gl.store(out_row + kv_head * heads + ids, zeros, mask=ids < heads)


@gluon.jit
def _decode_sequence(
    inputs, strides, results, scale_log2, double_from, kv_head, seq, first_split, step,
    FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Every ``step``-th split of one sequence and key head, if the sequence has ``query_len`` query tokens.

    With EARLY this is where the program waits for the kernels before it; one without a split leaves at once. The part
    of the first tile that earlier steps wrote is loaded before the wait.
    """
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks = inputs
    stride_q, stride_slot, stride_table = strides
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = FIXED.keys
    QUERY_LEN: gl.constexpr = FIXED.query_len
    PRODUCTS: gl.constexpr = products_layout(WARPS)
    OF_KEYS: gl.constexpr = key_layout(WARPS, KEYS // (16 * WARPS))
    OF_VALUES: gl.constexpr = value_layout(WARPS, KEYS // (16 * WARPS))
    row = gl.load(cu_seqlens_q + seq)
    query_len = gl.load(cu_seqlens_q + seq + 1) - row
    kv_len = gl.load(seq_lens + seq)
    table = page_table + seq.to(gl.int64) * stride_table
    if query_len == QUERY_LEN:
        split_tokens = split_of(kv_len, double_from, FIXED.split)
        num_splits = (kv_len + split_tokens - 1) // split_tokens
        if first_split < num_splits:
            if QUERY_LEN == 1:
                release_by_work(EARLY, gl.minimum(num_splits, step), step)
            stride_word = stride_slot // 4
            k_words = k_cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * WORDS
            v_words = v_cache.to(gl.pointer_type(gl.int32), bitcast=True) + kv_head * WORDS
            caches = ((k_words, stride_word), (v_words, stride_word))
            of_keys = places_of(stride_word, KEYS, 1, OF_KEYS)
            of_values = places_of(stride_word, KEYS, 2, OF_VALUES)
            places = (of_keys, of_values)
            tokens = along(0, WARPS, PRODUCTS) * (KEYS // WARPS) + along(1, KEYS // WARPS, PRODUCTS)
            before = tokens - along(2, ROWS, PRODUCTS) // FIXED.group
            first = first_split * split_tokens
            newest = kv_len - QUERY_LEN
            keys, even, odd = _load_tile(caches, table, first, gl.minimum(newest, first + split_tokens), places, FIXED)
            wait(EARLY)
            queries = load_queries(q + row.to(gl.int64) * stride_q, stride_q, kv_head, FIXED, PRODUCTS)
            if first + KEYS > newest:
                keys, even, odd = _load_tile(caches, table, first, kv_len, places, FIXED)
            for split in range(first_split, num_splits, step):
                end = gl.minimum(kv_len, first + split_tokens)
                acc = gl.full([WARPS, HEAD_DIM, ROWS], 0.0, gl.float32, layout=PRODUCTS)
                row_sum = gl.full([WARPS, ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, PRODUCTS))
                row_max = gl.full([WARPS, ROWS], _LOWEST, gl.float32, layout=gl.SliceLayout(1, PRODUCTS))
                k_page = _load_page(table, first + KEYS, end, of_keys, FIXED)
                v_page = _load_page(table, first + KEYS, end, of_values, FIXED)
                for start in range(first, end, KEYS):
                    # The next loads reuse the registers of the operands that were just multiplied.
                    scores = scores_of(keys, queries, FIXED, PRODUCTS)
                    keys = _load(caches[0], k_page, start + KEYS, end, of_keys, FIXED)
                    k_page = _load_page(table, start + 2 * KEYS, end, of_keys, FIXED)
                    visible = start + tokens < end
                    if QUERY_LEN > 1:
                        visible = visible & (before <= newest - start)
                    p, row_sum, row_max, shrink = softmax(
                        scores, row_sum, row_max, visible, scale_log2, FIXED, PRODUCTS
                    )  # fmt: skip
                    acc = add_values(acc * gl.expand_dims(shrink, 1), even, odd, p, FIXED, PRODUCTS)
                    even, odd = _load_values(caches[1], v_page, start + KEYS, end, of_values, FIXED)
                    v_page = _load_page(table, start + 2 * KEYS, end, of_values, FIXED)
                place = (row, seq, kv_head, split, num_splits)
                _store_split((acc, row_sum, row_max), results, sinks, place, FIXED, PRODUCTS)
                first += step * split_tokens
                end = gl.minimum(kv_len, first + split_tokens)
                keys, even, odd = _load_tile(caches, table, first, end, places, FIXED)
    else:
        wait(EARLY)


@functools.partial(
    GluonKernel,
    do_not_specialize=["num_rows", "num_seqs", "max_splits", "double_from", "stride_table"],
    do_not_specialize_on_alignment=METADATA,
)
def decode_hopper_kernel(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks, v_scale, out, partial, partial_lse, counts,
    scale_log2, num_rows, num_seqs, max_splits, double_from, stride_q, stride_out, stride_slot, stride_table,
    FIXED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The arguments, the grid and the results of ``_decode_kernel`` of ``decode.py``."""
    release(EARLY)
    inputs = (q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks)
    strides = (stride_q, stride_slot, stride_table)
    results = (out, partial, partial_lse, v_scale, max_splits, stride_out)
    decode_programs(
        _decode_sequence, _store_zeros, inputs, strides, results, counts, scale_log2, num_rows, num_seqs, double_from,
        FIXED, EARLY,
    )  # fmt: skip
