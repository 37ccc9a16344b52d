"""Attention of prompts over selected pools: a block of tokens reads every key once, and masks what is not selected.

Job: the tokens of ``indexed_attention`` for which that is faster (``tokens.dense_segment``). Owns: the masks, tile
shapes. Does not know: layers, how pools are selected.

Each token's own selection is 16 rows of a product at most, and its keys are gathered. A block of tokens fills a
product, so up to several times the selected keys are read and multiplied in less time. The query heads that share a
key head stand together as rows of one tile.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.attention.prefill import prefill_tile
from weft.ops.attention.tiles import Tile
from weft.ops.indexed_attention.tokens import METADATA, dense_segment, longest, metadata, place_of
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, is_small, next_power_of_2, precision


class Fixed(NamedTuple):
    """Compile-time parameters.

    Attributes:
        group: query heads of a key head.
        key_dim, value_dim, page_size: of the layer.
        selected, pool: pools that are selected at most, and tokens of a pool.
        tokens, rows, keys, block_k, block_v: of a tile.
        precision: of products of float32 operands.
        stages: of the pipeline.
    """

    group: int
    key_dim: int
    value_dim: int
    page_size: int
    selected: int
    pool: int
    tokens: int
    rows: int
    keys: int
    block_k: int
    block_v: int
    precision: str
    stages: int


@jit(do_not_specialize=["num_seqs", "num_words"], do_not_specialize_on_alignment=METADATA)
def _mark_pools_kernel(
    selected, words, seq_lens, cu_seqlens_q, counts, num_seqs, num_words,
    COUNT: tl.constexpr, POOL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Set a bit for each selected pool of one token, if the dense kernel computes the token."""
    enter(EARLY)
    token = tl.program_id(0)
    seq, position = place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs)
    if position >= 0:
        _first, _last, _length, is_dense = dense_segment(token, seq, seq_lens, cu_seqlens_q, COUNT, POOL, TOKENS)
        if is_dense:
            row = token.to(tl.int64)
            places = tl.arange(0, BLOCK)
            pools = tl.load(selected + row * COUNT + places, mask=places < COUNT, other=-1)
            bits = tl.full([BLOCK], 1, tl.int32) << (pools & 31)
            tl.atomic_or(words + row * num_words + (pools >> 5), bits, mask=pools >= 0, sem="relaxed")


@jit(do_not_specialize=["num_rows", "num_seqs", "num_words", "stride_table"], do_not_specialize_on_alignment=METADATA)
def _dense_kernel(
    q, k_cache, v_cache, words, out, page_table, seq_lens, cu_seqlens_q, counts, num_rows, num_seqs, num_words,
    stride_table, scale_log2, stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a block of tokens with the query heads of one key head, sequence by sequence."""
    enter(EARLY)
    GROUP: tl.constexpr = FIXED.group
    POOL: tl.constexpr = FIXED.pool
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    KEYS: tl.constexpr = FIXED.keys
    TOKENS: tl.constexpr = FIXED.tokens
    ROWS: tl.constexpr = FIXED.rows
    BLOCK_V: tl.constexpr = FIXED.block_v
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks of a prompt see most keys: they go first
    lanes = tl.arange(0, ROWS)
    o_k, o_v = tl.arange(0, FIXED.block_k), tl.arange(0, BLOCK_V)
    in_k, in_v = o_k < FIXED.key_dim, o_v < FIXED.value_dim
    rows = block * TOKENS + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    token = block * TOKENS
    end = tl.minimum(token + TOKENS, num_rows)
    while token < end:
        seq, position = place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs)
        next_token = end  # padding is at the end
        if position >= 0:
            first, last, length, is_dense = dense_segment(
                token, seq, seq_lens, cu_seqlens_q, FIXED.selected, POOL, TOKENS
            )
            next_token = last
            if is_dense:
                mine = (rows >= first) & (rows < last) & (lanes < TOKENS * GROUP)
                wide = rows.to(tl.int64)
                p_q = q + wide * stride_q + heads * stride_q_head
                queries = tl.load(p_q[:, None] + o_k[None, :], mask=mine[:, None] & in_k[None, :], other=0.0)
                positions = length - last + rows
                tails = (positions + 1) // POOL * POOL
                table = page_table + seq.to(tl.int64) * stride_table
                p_words = words + wide * num_words
                acc = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
                row_sum = tl.zeros([ROWS], dtype=tl.float32)
                row_max = tl.full([ROWS], -1e30, dtype=tl.float32)  # finite: rows may see no key of a tile
                ahead = tl.arange(0, KEYS)
                next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
                for start in tl.range(0, length, KEYS, num_stages=FIXED.stages):
                    keys = start + tl.arange(0, KEYS)
                    slots = next_page.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
                    ahead = keys + KEYS
                    next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < length, other=0)
                    inside = keys < length
                    p_k = k_cache + slots[:, None] * stride_k + kv_head * stride_k_head + o_k[None, :]
                    k = tl.load(p_k, mask=inside[:, None] & in_k[None, :], other=0.0)
                    p_v = v_cache + slots[:, None] * stride_v + kv_head * stride_v_head + o_v[None, :]
                    v = tl.load(p_v, mask=inside[:, None] & in_v[None, :], other=0.0)
                    word = tl.load(p_words + start // POOL // 32, mask=mine, other=0)
                    is_selected = ((word[:, None] >> (keys // POOL % 32)[None, :]) & 1) != 0
                    in_tail = (keys[None, :] >= tails[:, None]) & (keys[None, :] <= positions[:, None])
                    scores = tl.dot(queries, tl.trans(k), input_precision=FIXED.precision)
                    scores = tl.where(is_selected | in_tail, scores, float("-inf"))
                    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
                    shrink = tl.exp2(row_max - new_max)
                    p = tl.exp2(scores * scale_log2 - new_max[:, None])
                    row_sum = row_sum * shrink + tl.sum(p, 1)
                    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=FIXED.precision)
                    row_max = new_max
                acc = acc / tl.where(mine, row_sum, 1.0)[:, None]
                p_out = out + (wide * tl.num_programs(0) * GROUP + heads) * FIXED.value_dim
                mask = mine[:, None] & in_v[None, :]
                tl.store(p_out[:, None] + o_v[None, :], acc.to(out.dtype.element_ty), mask=mask)
        token = next_token


def dense_tile(q: Tensor, v_cache: Tensor, pool: int) -> Tile | None:
    """The tile for so many rows and heads; None: each token reads its own selection. A word of marks serves a tile."""
    num_rows, num_heads, key_dim = q.shape
    group, widest = num_heads // v_cache.shape[2], max(key_dim, v_cache.shape[3])
    small = is_small(q.device)
    if pool < 2 or pool & (pool - 1) or group > 16 or widest > 256 or (small and q.element_size() == 4):
        return None
    return prefill_tile(num_rows, num_heads, widest, group, q.element_size(), small=small)


def attend_dense(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, selected: Tensor, out: Tensor, batch: Batch, tile: Tile, *, pool: int,
    scale: float,
) -> None:  # fmt: skip
    """``indexed_attention`` of the tokens of ``dense_segment``, into their rows of ``out``."""
    num_rows, num_heads, key_dim = q.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    count, group = selected.shape[1], num_heads // num_kv_heads
    tokens = tile.rows // group
    most = min(longest(batch, page_size), 2 * tokens * count * pool // 5)
    words = torch.zeros(num_rows, most // pool // 32 + 1, dtype=torch.int32, device=q.device)
    table, seq_lens, cu_seqlens_q, counts, num_seqs, stride_table = metadata(batch)
    _mark_pools_kernel[(num_rows,)](
        selected, words, seq_lens, cu_seqlens_q, counts, num_seqs, words.shape[1],
        COUNT=count, POOL=pool, TOKENS=tokens, BLOCK=next_power_of_2(count), num_warps=4, **early_launch(q.device),
    )  # fmt: skip
    fixed = Fixed(
        group, key_dim, value_dim, page_size, count, pool, tokens, tile.rows, tile.keys,
        max(16, next_power_of_2(key_dim)), max(16, next_power_of_2(value_dim)), precision(q), tile.stages,
    )  # fmt: skip
    _dense_kernel[(num_kv_heads, cdiv(num_rows, tokens))](
        q, k_cache, v_cache, words, out, table, seq_lens, cu_seqlens_q, counts, num_rows, num_seqs, words.shape[1],
        stride_table, scale * LOG2_E.value, q.stride(0), q.stride(1), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(1), v_cache.stride(2),
        FIXED=fixed, num_warps=tile.warps, **early_launch(q.device),
    )  # fmt: skip
