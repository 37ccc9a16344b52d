"""Attention over selected pools on the GPU: a program takes one token and the query heads of one key head.

Job: ``indexed_attention``. Owns: tile shapes, the size of a split. Does not know: layers, how pools are selected.

With few tokens, several programs share the keys of a token, and a second kernel merges their results. Tokens of
prompts may be left to the kernel of ``dense.py``.

Graph-safe: grids depend on padded sizes alone; which rows are real, and their lengths, are read on the device.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.indexed_attention import indexed_attention
from weft.ops.indexed_attention.dense import attend_dense, dense_tile
from weft.ops.indexed_attention.tokens import METADATA, dense_segment, is_decode, metadata, num_seen, place_of
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2, precision

_LEAST_SPLIT = 64
"""Tokens that a program reads, at least."""
_SMALL_RESULT = 4096
"""Numbers of a program's result up to which several programs run on a multiprocessor at once. Larger partial results
would also take longer to merge than the keys take to read."""


class Fixed(NamedTuple):
    """Compile-time parameters.

    Attributes:
        group: query heads of a key head.
        key_dim, value_dim, page_size: of the layer.
        same: keys and values are columns of one cache, and the values come first.
        selected, pool: pools that are selected at most, and tokens of a pool.
        split: tokens of a split; 0: a program takes all tokens of its row.
        rows, keys, block_k, block_v: of a tile. With ``same``, ``block_k`` holds the columns after the values, or is 0.
        precision: of products of float32 operands.
        stages: of the pipeline.
        dense_tokens: tokens of a block of ``dense.py``; 0: all tokens are this kernel's.
    """

    group: int
    key_dim: int
    value_dim: int
    page_size: int
    same: bool
    selected: int
    pool: int
    split: int
    rows: int
    keys: int
    block_k: int
    block_v: int
    precision: str
    stages: int
    dense_tokens: int


@jit(do_not_specialize=["num_seqs", "stride_table", "max_splits"], do_not_specialize_on_alignment=METADATA)
def _indexed_attention_kernel(
    q, k_cache, v_cache, selected, out, partial, partial_lse, page_table, seq_lens, cu_seqlens_q, counts, num_seqs,
    stride_table, max_splits, scale_log2, stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one token with the query heads of one key head, over all keys of the token or one split."""
    enter(EARLY)
    GROUP: tl.constexpr = FIXED.group
    POOL: tl.constexpr = FIXED.pool
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    VALUE_DIM: tl.constexpr = FIXED.value_dim
    KEY_FIRST: tl.constexpr = FIXED.value_dim if FIXED.same else 0
    SPLIT: tl.constexpr = FIXED.split
    KEYS: tl.constexpr = FIXED.keys
    ROWS: tl.constexpr = FIXED.rows
    BLOCK_V: tl.constexpr = FIXED.block_v
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    lanes, o_v = tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    heads = kv_head * GROUP + lanes
    valid, in_v = lanes < GROUP, o_v < VALUE_DIM
    row = token.to(tl.int64)
    num_heads = tl.num_programs(1) * GROUP
    p_out = out + (row * num_heads + heads)[:, None] * VALUE_DIM + o_v[None, :]
    mask = valid[:, None] & in_v[None, :]
    seq, position = place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs)
    if position < 0:
        if tl.program_id(2) == 0:
            tl.store(p_out, tl.zeros([ROWS, BLOCK_V], out.dtype.element_ty), mask=mask)
        return
    if FIXED.dense_tokens > 0:
        _first, _last, _length, is_dense = dense_segment(
            token, seq, seq_lens, cu_seqlens_q, FIXED.selected, FIXED.pool, FIXED.dense_tokens
        )
        if is_dense:
            return
    num_selected, total = num_seen(position, FIXED.selected, POOL)
    begin = 0
    end = total
    if SPLIT > 0:
        begin = tl.program_id(2) * SPLIT
        end = tl.minimum(total, begin + SPLIT)
    if begin >= total:
        return
    p_q = q + row * stride_q + heads[:, None] * stride_q_head
    if FIXED.same:
        q_values = tl.load(p_q + o_v[None, :], mask=mask, other=0.0)
    if FIXED.block_k > 0:
        o_k = KEY_FIRST + tl.arange(0, FIXED.block_k)
        in_k = o_k < FIXED.key_dim
        q_keys = tl.load(p_q + o_k[None, :], mask=valid[:, None] & in_k[None, :], other=0.0)
    tail = (position + 1) // POOL * POOL - num_selected
    table = page_table + seq.to(tl.int64) * stride_table
    pools = selected + row * FIXED.selected
    acc = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=FIXED.stages):
        places = start + tl.arange(0, KEYS)
        inside = places < end
        in_pool = inside & (places < num_selected)
        pool = tl.load(pools + places // POOL, mask=in_pool, other=0)
        tokens = tl.where(in_pool, pool * POOL + places % POOL, tail + places)
        page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        slots = page * PAGE_SIZE + tokens % PAGE_SIZE
        p_values = v_cache + slots[:, None] * stride_v + kv_head * stride_v_head + o_v[None, :]
        values = tl.load(p_values, mask=inside[:, None] & in_v[None, :], other=0.0)
        scores = tl.zeros([ROWS, KEYS], dtype=tl.float32)
        if FIXED.same:
            scores = tl.dot(q_values, tl.trans(values), scores, input_precision=FIXED.precision)
        if FIXED.block_k > 0:
            p_keys = k_cache + slots[:, None] * stride_k + kv_head * stride_k_head + o_k[None, :]
            keys = tl.load(p_keys, mask=inside[:, None] & in_k[None, :], other=0.0)
            scores = tl.dot(q_keys, tl.trans(keys), scores, input_precision=FIXED.precision)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shrink = tl.exp2(row_max - new_max)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=FIXED.precision)
        row_max = new_max
    acc = acc / row_sum[:, None]
    if SPLIT > 0:  # noqa: SIM102 (known to the compiler, so not one condition with the next)
        if total > SPLIT:
            place = (row * max_splits + tl.program_id(2)) * num_heads + heads
            tl.store(partial_lse + place, row_max + tl.log2(row_sum), mask=valid)
            tl.store(partial + place[:, None] * VALUE_DIM + o_v[None, :], acc, mask=mask)
            return
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_seqs", "max_splits"], do_not_specialize_on_alignment=METADATA)
def _merge_splits_kernel(
    out, partial, partial_lse, seq_lens, cu_seqlens_q, counts, num_seqs, max_splits,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr,
    POOL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits of one token and head, if there are several."""
    enter(EARLY)
    token, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _seq, position = place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs)
    _selected, total = num_seen(position, COUNT, POOL)
    if (position < 0) | (total <= SPLIT):
        return
    dims = tl.arange(0, BLOCK_V)
    in_dim = dims < VALUE_DIM
    num_splits = tl.cdiv(total, SPLIT)
    acc = tl.zeros([BLOCK_V], dtype=tl.float32)
    share_sum = tl.full([], 0.0, tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        valid = splits < num_splits
        place = (token.to(tl.int64) * max_splits + splits) * num_heads + head
        lse = tl.load(partial_lse + place, mask=valid, other=float("-inf"))
        mask = valid[:, None] & in_dim[None, :]
        values = tl.load(partial + place[:, None] * VALUE_DIM + dims[None, :], mask=mask, other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        shrink, shares = tl.exp2(largest - new_largest), tl.exp2(lse - new_largest)
        acc = acc * shrink + tl.sum(values * shares[:, None], 0)
        share_sum = share_sum * shrink + tl.sum(shares, 0)
        largest = new_largest
    p_out = out + (token.to(tl.int64) * num_heads + head) * VALUE_DIM + dims
    tl.store(p_out, (acc / share_sum).to(out.dtype.element_ty), mask=in_dim)


@launches(indexed_attention)
def indexed_attention_triton(q, k_cache, v_cache, selected, batch, *, pool, scale) -> Tensor:
    num_rows, num_heads, key_dim = q.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    same = k_cache.data_ptr() == v_cache.data_ptr()
    assert q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == 1 and selected.is_contiguous()
    assert all(cache.stride(0) == page_size * cache.stride(1) for cache in (k_cache, v_cache))
    count, group = selected.shape[1], num_heads // num_kv_heads
    small = group * value_dim <= _SMALL_RESULT
    split, max_splits = _splits(num_rows * num_kv_heads, (count + 1) * pool - 1, 4 if small else 1)
    block_v = max(16, next_power_of_2(value_dim))
    rest = key_dim - value_dim if same else key_dim
    block_k = max(16, next_power_of_2(rest)) if rest else 0
    keys = max(16, min(64, 16384 // block_v))
    wide = q.element_size() < 4
    tile = None if same or max_splits > 1 or is_decode(batch) else dense_tile(q, v_cache, pool)
    fixed = Fixed(
        group, key_dim, value_dim, page_size, same, count, pool, split, max(16, next_power_of_2(group)), keys, block_k,
        block_v, precision(q), 2 if wide else 1, 0 if tile is None else tile.rows // group,
    )  # fmt: skip
    out = torch.empty(num_rows, num_heads, value_dim, dtype=q.dtype, device=q.device)
    shape = (num_rows, max_splits, num_heads) if max_splits > 1 else (1, 1, 1)
    partial = torch.empty((*shape, value_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    table, seq_lens, cu_seqlens_q, counts, num_seqs, stride_table = metadata(batch)
    _indexed_attention_kernel[(num_rows, num_kv_heads, max_splits)](
        q, k_cache, v_cache, selected, out, partial, partial_lse, table, seq_lens, cu_seqlens_q, counts, num_seqs,
        stride_table, max_splits, scale * LOG2_E.value, q.stride(0), q.stride(1), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(1), v_cache.stride(2),
        FIXED=fixed, num_warps=8 if fixed.rows * block_v >= 16384 else 4, **early_launch(q.device),
    )  # fmt: skip
    if tile is not None:
        attend_dense(q, k_cache, v_cache, selected, out, batch, tile, pool=pool, scale=scale)
    if max_splits > 1:
        _merge_splits_kernel[(num_rows, num_heads)](
            out, partial, partial_lse, seq_lens, cu_seqlens_q, counts, num_seqs, max_splits,
            VALUE_DIM=value_dim, BLOCK_V=block_v, SPLIT=split, SPLITS=16, COUNT=count,
            POOL=pool, num_warps=4, **early_launch(q.device),
        )  # fmt: skip
    return out


def _splits(programs: int, most: int, at_once: int) -> tuple[int, int]:
    """Tokens of a split (0: all), and splits of a row, for so many rows of at most ``most`` tokens, and for so many
    programs at once on a multiprocessor."""
    wanted = cdiv(at_once * MULTIPROCESSORS, programs)
    split = max(_LEAST_SPLIT, next_power_of_2(cdiv(most, wanted)))
    return (0, 1) if split >= most else (split, cdiv(most, split))
