"""Paged attention of sequences with several query tokens, and zeros for padding rows.

Job: the flash-style prefill kernel. Owns: tile shapes and the order of blocks. Does not know: layers, or who filled the
pages.

The query heads that share a key head stand together as rows of one tile (``row = token * group + head``), so each key
is read once per group.
"""

from typing import NamedTuple

import triton.language as tl

from weft.ops.attention import AttentionCall
from weft.ops.attention.tiles import (
    METADATA,
    Tile,
    accumulate,
    check_layout,
    load_keys_values,
    prefilled,
    sequence_of_block,
    start_softmax,
)
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2, precision

_LONG_ROWS = 131072
"""Least (token, head) rows for which larger tiles are faster, for heads of up to 128."""

_SHORT_ROWS = 24576
"""Least (token, head) rows for tiles of 128 rows. With fewer some multiprocessors would have no work."""


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        head_dim, group, page_size: of the model; so many query heads share a key head.
        tokens, rows, keys, block_d: of a tile.
        precision: of products of float32 operands.
        stages: see ``Tile``.
        sinks: dimensions of the sinks: 1 by head, 2 by row and head, 0 without.
        scaled: results are multiplied by the scale of the values.
        extent, num_heads: entries of the bias of a row and head, 0 without one, and heads of a row.
    """

    head_dim: int
    group: int
    page_size: int
    tokens: int
    rows: int
    keys: int
    block_d: int
    precision: str
    stages: int
    sinks: int
    scaled: bool
    extent: int = 0
    num_heads: int = 0


@jit(
    do_not_specialize=["num_rows", "num_seqs", "least_tokens", "stride_table"],
    do_not_specialize_on_alignment=METADATA,
)
def _prefill_kernel(
    q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, sinks, v_scale, out, counts,
    scale_log2, num_rows, num_seqs, least_tokens, stride_q, stride_out, stride_slot, stride_table, bias,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    GROUP: tl.constexpr = FIXED.group
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    TOKENS: tl.constexpr = FIXED.tokens
    ROWS: tl.constexpr = FIXED.rows
    KEYS: tl.constexpr = FIXED.keys
    BLOCK_D: tl.constexpr = FIXED.block_d
    PRECISION: tl.constexpr = FIXED.precision
    LOWEST: tl.constexpr = float("-inf")
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks of a sequence see most keys: they go first
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    head_offsets = (kv_head * GROUP + lanes % GROUP) * HEAD_DIM
    first_seq = 0
    first_token = 0
    if num_seqs < 0:  # as in place_of_block
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
        seq = sequence_of_block(cu_seqlens_q, block, first_seq, first_token, num_seqs, TOKENS)
        begin = tl.load(cu_seqlens_q + seq)
        query_len = tl.load(cu_seqlens_q + seq + 1) - begin
        first = (
            block - ((begin - first_token) // TOKENS + seq - first_seq)
        ) * TOKENS  # the block's first token, counted in this step's tokens
        if (first < query_len) & (query_len >= least_tokens):
            context_len = tl.load(seq_lens + seq) - query_len
            tokens = first + lanes // GROUP
            mask = ((lanes < TOKENS * GROUP) & (tokens < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
            rows = (begin + tokens).to(tl.int64)[:, None]
            offsets = head_offsets[:, None] + dims[None, :]
            queries = tl.load(q + rows * stride_q + offsets, mask=mask, other=0.0)
            heads = kv_head * GROUP + lanes % GROUP
            in_block = lanes < TOKENS * GROUP
            places, has_sink = heads, in_block
            if FIXED.sinks == 2:
                places = (begin + tokens).to(tl.int64) * FIXED.num_heads + heads
                has_sink = in_block & (tokens < query_len)
            acc, row_sum, row_max = start_softmax(sinks, places, has_sink, ROWS, BLOCK_D, FIXED.sinks, LOWEST)
            positions = context_len + tokens
            bias_rows = None
            if FIXED.extent > 0:
                p_bias = bias + ((begin + tokens).to(tl.int64) * FIXED.num_heads + heads) * FIXED.extent
                bias_rows = (p_bias, tl.where(in_block & (tokens < query_len), positions, -1))
            table = page_table + seq.to(tl.int64) * stride_table
            cache = (k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table, stride_slot)
            end = context_len + tl.minimum(first + TOKENS, query_len)
            common = (context_len + first + 1) // KEYS * KEYS  # keys that every row of the block sees
            ahead = tl.arange(0, KEYS)
            next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)
            for start in tl.range(0, common, KEYS, num_stages=FIXED.stages):
                keys = start + tl.arange(0, KEYS)
                page = next_page
                ahead = keys + KEYS
                next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)
                k, v = load_keys_values(cache, page, keys, keys < end, dims, FIXED, False)
                acc, row_sum, row_max = accumulate(
                    acc, row_sum, row_max, queries, k, v, None, scale_log2, PRECISION, False,
                    keys, bias_rows, FIXED.extent,
                )  # fmt: skip
            for start in tl.range(common, end, KEYS, num_stages=1):
                keys = start + tl.arange(0, KEYS)
                page = tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0)
                k, v = load_keys_values(cache, page, keys, keys < end, dims, FIXED, True)
                visible = keys[None, :] <= positions[:, None]
                acc, row_sum, row_max = accumulate(
                    acc, row_sum, row_max, queries, k, v, visible, scale_log2, PRECISION, True,
                    keys, bias_rows, FIXED.extent,
                )  # fmt: skip
            acc = acc / row_sum[:, None]
            if FIXED.scaled:
                acc *= tl.load(v_scale)
            tl.store(out + rows * stride_out + offsets, acc.to(out.dtype.element_ty), mask=mask)


def prefill_tile(
    num_rows: int, num_heads: int, head_dim: int, group: int, element_size: int, *, small: bool = False
) -> Tile:
    """Tile of the prefill kernel. Rows hold at least one token of every head of the group. ``small``: see
    ``is_small``."""
    at_least = next_power_of_2(group)
    if element_size == 4 or head_dim > 256:  # such as Zamba's heads of 464
        return Tile(rows=max(32, at_least), keys=32, warps=4, stages=1)
    if head_dim <= 128 and num_rows * num_heads >= _LONG_ROWS:
        return Tile(rows=max(128, at_least), keys=64, warps=8, stages=3)
    if head_dim <= 128:
        return Tile(rows=max(64, at_least), keys=64, warps=4, stages=3)
    if small:
        return Tile(rows=max(64, at_least), keys=32, warps=4, stages=2)
    if num_rows * num_heads < _SHORT_ROWS:
        return Tile(rows=max(64, at_least), keys=64, warps=4, stages=2)
    return Tile(rows=max(128, at_least), keys=64, warps=8, stages=2)


def launch_prefill(call: AttentionCall, tile: Tile, *, skip_decodes: bool) -> None:
    """Sequences with more query tokens (all, unless ``skip_decodes``) and all padding rows, with a given tile."""
    check_layout(call)
    q, k_cache, v_cache, batch, scale, out, sinks, v_scale, bias = call
    num_rows, num_heads, head_dim = q.shape
    num_seqs, (_, page_size, num_kv_heads, _) = batch.seq_lens.shape[0], k_cache.shape
    group = num_heads // num_kv_heads
    tokens = tile.rows // group
    # Sequences end in a broken block each, hence their number; the last one is for padding rows.
    blocks = num_rows // tokens + (num_seqs if batch.mixed is None else batch.mixed.max_prefills) + 1
    counts, num_seqs, least_tokens = prefilled(batch, skip_decodes=skip_decodes)
    fixed = Fixed(
        head_dim, group, page_size, tokens, tile.rows, tile.keys, max(16, next_power_of_2(head_dim)), precision(q),
        tile.stages, 0 if sinks is None else sinks.dim(), v_scale is not None, 0 if bias is None else bias.shape[2],
        num_heads,
    )  # fmt: skip
    _prefill_kernel[(num_kv_heads, blocks)](
        q, k_cache, v_cache, batch.page_table, batch.seq_lens, batch.cu_seqlens_q,
        q if sinks is None else sinks, q if v_scale is None else v_scale, out,
        counts, scale * LOG2_E.value, num_rows, num_seqs, least_tokens,
        q.stride(0), out.stride(0), num_kv_heads * head_dim, batch.page_table.stride(0), bias,
        FIXED=fixed, num_warps=tile.warps, **early_launch(q.device),
    )  # fmt: skip
