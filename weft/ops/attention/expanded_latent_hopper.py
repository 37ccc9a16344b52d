"""Attention over latents that are expanded to keys and values of every head, for Hopper: prefills of many tokens.

Job: ``plan_expansion`` and ``expanded_latent_attention`` on the GPU. The first kernel chooses the sequences and gives
them pages. The second kernel multiplies their latents by the weights of the expansion, and writes keys and values to
these pages. Then the prefill kernel for Hopper (``prefill_hopper.py``) reads the pages. Owns: the pages, which live for
one call, and which sequences pay. Does not know: layers, who filled the cache of latents.

Every sequence begins at a tile of the expansion, and its tiles are consecutive. A sequence that is not expanded gets
length 0, so the prefill kernel finds no key for its rows and does not write them. If the pages of all heads would take
more than ``EXPANDED_BYTES``, groups of heads use the same pages, one after another.

Graph-safe: lengths and counts are read on the device, and a fixed number of programs goes through the present tiles.
The expansion is an ordinary launch, because the prefill kernel reads lengths and pages before its wait
(``ops/triton/early_launch.py``).
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.attention import EXPANDED_BYTES, AttentionCall, Expansion, expanded_latent_attention
from weft.ops.attention.tiles import METADATA
from weft.ops.backend import launches
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.ops.triton.hopper import runs_gluon
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import MULTIPROCESSORS, cdiv, next_power_of_2, precision

if GLUON_IS_KNOWN:
    from weft.ops.attention.prefill_hopper import launch_prefill_hopper

_TILE, _PAGE = 128, 64
"""Tokens of a tile of the expansion and of a page."""

_STEP, _STAGES = 32, 6
"""Columns of latents that are multiplied at a time, and stages of the pipeline. On an H200, 64 columns and 3 or 4
stages were as fast. A flattened loop, which loads the next tile before it stores a tile, was slower
(``kernels-latent-shapes-h200.json``)."""

_MOST_COLUMNS, _LEAST_COLUMNS = 256, 48
"""Columns of a head that the prefill kernel takes."""

_ROWS_EACH = 128
"""Least rows per sequence that does not decode. A program of the prefill kernel has so many rows of one head."""

_LEAST_CHUNK = 128
"""Least tokens of a sequence with a context that is expanded. On an H200, 128 tokens of Kimi-Linear behind 8,000 take
306 us instead of 559. Eight sequences of 64 tokens each would take 1,677 us instead of 1,144
(``kernels-latent-context-h200.json``)."""

_CHOICE = ["lengths", "absorbed_lens", "starts"]
"""Rows of one tensor, so their alignment follows from the number of sequences."""

_MOST_PREFILLS = 512
"""Most sequences that do not decode: ``_plan_kernel`` looks at all of them at once."""


class Fixed(NamedTuple):
    """Compile-time parameters of the expansion.

    Attributes:
        key, shared, of_value, rank: columns of a head's own key, of the shared part, of a value and of a latent.
        width, of_values: columns of a head in the pages of keys and of values; what is beyond a head's own is zero.
        entry, page_size: columns of an entry of the cache, and entries of a page.
        block_key, block_rest, block_value: powers of two for own keys, for the columns behind them, and for values.
        precision: of products of float32 operands.
    """

    key: int
    shared: int
    of_value: int
    rank: int
    width: int
    of_values: int
    entry: int
    page_size: int
    block_key: int
    block_rest: int
    block_value: int
    precision: str


def plan_on_hopper(own: Tensor, shared_dim: int, value_dim: int, batch: Batch) -> Expansion | None:
    """Choose the sequences to be expanded. See ``plan_expansion``."""
    if own.dtype != torch.bfloat16 or not GLUON_IS_KNOWN or not runs_gluon(own.device):
        return None
    (num_rows, heads, key_dim), mixture = own.shape, batch.mixed
    most = batch.num_seqs - batch.num_decodes if mixture is None else mixture.max_prefills
    prefills = 0 < most <= _MOST_PREFILLS and (mixture is not None or batch.max_query_len > 1)
    if not prefills or (mixture is None and _ROWS_EACH * most > num_rows):
        return None
    if max(key_dim + shared_dim, value_dim) > _MOST_COLUMNS:
        return None
    tiles = most * cdiv(batch.max_seq_len, _TILE)
    if mixture is not None:
        # A graph has room for the step's own tokens, and for contexts where that costs nothing else.
        tile_bytes = heads * _TILE * 2 * sum(_columns(key_dim + shared_dim, value_dim))
        tiles = max(num_rows // _TILE + most, min(tiles, EXPANDED_BYTES // tile_bytes))
    elif batch.num_prefill_keys is not None:
        tiles = batch.num_prefill_keys // _TILE + most
    num_seqs = batch.seq_lens.shape[0]
    lengths, seq_lens, starts = batch.seq_lens.new_empty(3, num_seqs)
    page_table = batch.seq_lens.new_empty(num_seqs, tiles * (_TILE // _PAGE))
    seq_of_tile, num_tiles = batch.seq_lens.new_empty(tiles), batch.seq_lens.new_empty(1)
    _plan_kernel[(num_seqs,)](
        batch.seq_lens, batch.cu_seqlens_q, batch.seq_lens if mixture is None else mixture.counts, lengths, seq_lens,
        starts, page_table, seq_of_tile, num_tiles, num_seqs, batch.num_decodes, tiles, page_table.stride(0),
        TILE=_TILE, PAGE=_PAGE, LEAST=_LEAST_CHUNK, MOST=_MOST_PREFILLS, MIXTURE=mixture is not None,
        num_warps=4, **early_launch(own.device),
    )  # fmt: skip
    is_whole = mixture is None and batch.least_chunk is not None and batch.least_chunk >= _LEAST_CHUNK
    return Expansion(lengths, seq_lens, is_whole, (starts, page_table, seq_of_tile, num_tiles))


@jit(
    do_not_specialize=["num_seqs", "num_decodes", "tiles", "stride_table"],
    do_not_specialize_on_alignment=METADATA + _CHOICE,
)
def _plan_kernel(
    seq_lens, cu_seqlens_q, counts, lengths, absorbed_lens, starts, page_table, seq_of_tile, num_tiles, num_seqs,
    num_decodes, tiles, stride_table,
    TILE: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, MIXTURE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Choose sequences, and note length and places of sequence ``program_id``, in order.

    Sequences that begin have room in any case. Of the others those are chosen that have enough tokens and whose keys
    fit in the rest, counted with the keys of the earlier candidates."""
    enter(EARLY)
    if MIXTURE:
        num_seqs = tl.load(counts + 1)
        num_decodes = tl.load(counts + 2)
    own = tl.program_id(0)
    offsets = num_decodes + tl.arange(0, MOST)
    there = offsets < num_seqs
    kv_lens = tl.load(seq_lens + offsets, mask=there, other=0)
    query_lens = tl.load(cu_seqlens_q + offsets + 1, mask=there, other=0)
    query_lens -= tl.load(cu_seqlens_q + offsets, mask=there, other=0)
    begins = there & (kv_lens == query_lens)
    needed = (kv_lens + TILE - 1) // TILE
    room = tiles - tl.sum(tl.where(begins, needed, 0), 0)
    candidates = there & (query_lens >= LEAST) & (kv_lens > query_lens) & (needed <= room)
    fits = tl.cumsum(tl.where(candidates, needed, 0), 0) <= room
    chosen = begins | (candidates & fits)
    needed = tl.where(chosen, needed, 0)
    is_own = offsets == own
    count = tl.sum(tl.where(is_own, needed, 0), 0)
    start = tl.sum(tl.where(offsets < own, needed, 0), 0)
    kv_len = tl.load(seq_lens + own)
    query_len = tl.load(cu_seqlens_q + own + 1) - tl.load(cu_seqlens_q + own)
    tl.store(lengths + own, tl.where(count > 0, kv_len, 0))
    tl.store(absorbed_lens + own, tl.where(count > 0, query_len, kv_len))
    tl.store(starts + own, start)
    if own == 0:
        tl.store(num_tiles, tl.sum(needed, 0))
    some = tl.arange(0, MOST)
    for first in range(0, count, MOST):
        tl.store(seq_of_tile + start + first + some, own + some * 0, mask=first + some < count)
    pages = page_table + own.to(tl.int64) * stride_table
    for first in range(0, count * (TILE // PAGE), MOST):
        numbers = start * (TILE // PAGE) + first + some
        tl.store(pages + first + some, numbers, mask=first + some < count * (TILE // PAGE))


@jit(do_not_specialize=["num_heads", "stride_table"], do_not_specialize_on_alignment=METADATA + _CHOICE)
def _expand_kernel(
    latents, page_table, lengths, starts, seq_of_tile, num_tiles, k, v, k_pages, v_pages, num_heads, stride_table,
    TILE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Compute keys and values of all tiles and heads. A program takes every so many-th; tokens beyond a sequence's end
    get zeros."""
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    RANK: tl.constexpr = FIXED.rank
    KEY: tl.constexpr = FIXED.key
    VALUE: tl.constexpr = FIXED.of_value
    WIDTH: tl.constexpr = FIXED.width
    V_WIDTH: tl.constexpr = FIXED.of_values
    PRECISION: tl.constexpr = FIXED.precision
    BLOCK_K: tl.constexpr = FIXED.block_key
    BLOCK_V: tl.constexpr = FIXED.block_value
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    o_rest, o_step = tl.arange(0, FIXED.block_rest), tl.arange(0, STEP)
    places = tl.arange(0, TILE)
    for part in range(tl.program_id(0), tl.load(num_tiles) * num_heads, tl.num_programs(0)):
        tile = part // num_heads
        head = part % num_heads
        seq = tl.load(seq_of_tile + tile)
        tokens = (tile - tl.load(starts + seq)) * TILE + places
        valid = tokens < tl.load(lengths + seq)
        table = page_table + seq.to(tl.int64) * stride_table
        pages = tl.load(table + tokens // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        entries = latents + (pages * PAGE_SIZE + tokens % PAGE_SIZE)[:, None] * FIXED.entry
        p_k = k + head.to(tl.int64) * (KEY * RANK) + o_k[:, None] * RANK
        p_v = v + head.to(tl.int64) * (VALUE * RANK) + o_v[:, None] * RANK
        keys = tl.zeros([TILE, BLOCK_K], dtype=tl.float32)
        values = tl.zeros([TILE, BLOCK_V], dtype=tl.float32)
        for first in tl.range(0, RANK, STEP, num_stages=STAGES):
            columns = (first + o_step)[None, :]
            inside = columns < RANK
            x = tl.load(entries + columns, mask=valid[:, None] & inside, other=0.0)
            w_k = tl.load(p_k + columns, mask=(o_k < KEY)[:, None] & inside, other=0.0)
            w_v = tl.load(p_v + columns, mask=(o_v < VALUE)[:, None] & inside, other=0.0)
            keys = tl.dot(x, tl.trans(w_k), keys, input_precision=PRECISION)
            values = tl.dot(x, tl.trans(w_v), values, input_precision=PRECISION)
        slots = tile.to(tl.int64) * TILE + places
        p_keys = k_pages + (slots * num_heads + head)[:, None] * WIDTH
        p_values = v_pages + (slots * num_heads + head)[:, None] * V_WIDTH
        tl.store(p_keys + o_k[None, :], keys.to(k_pages.dtype.element_ty), mask=(o_k < KEY)[None, :])
        in_shared = (o_rest < FIXED.shared)[None, :]
        shared = tl.load(entries + RANK + o_rest[None, :], mask=valid[:, None] & in_shared, other=0.0)
        in_rest = (KEY + o_rest < WIDTH)[None, :]
        tl.store(p_keys + KEY + o_rest[None, :], shared.to(k_pages.dtype.element_ty), mask=in_rest)
        tl.store(p_values + o_v[None, :], values.to(v_pages.dtype.element_ty), mask=(o_v < V_WIDTH)[None, :])


def _columns(key: int, value: int) -> tuple[int, int]:
    """Columns of a head in the pages of keys and of values, for heads of so many. Tiles of 256 columns of keys may have
    128 of values."""
    if key > _MOST_COLUMNS // 2 and value <= 128:
        return cdiv(key, 16) * 16, 128
    width = max(_LEAST_COLUMNS, cdiv(max(key, value), 16) * 16)
    return width, width


@launches(expanded_latent_attention)
def expanded_latent_attention_triton(own, of_shared, latents, k, v, batch, expansion, *, scale, out) -> Tensor:
    (num_rows, heads, key_dim), (_, value_dim, rank), shared_dim = own.shape, v.shape, of_shared.shape[2]
    assert latents.is_contiguous() and k.is_contiguous() and v.is_contiguous() and out.is_contiguous()
    width, v_width = _columns(key_dim + shared_dim, value_dim)
    starts, page_table, seq_of_tile, num_tiles = expansion.places
    slots = seq_of_tile.shape[0] * _TILE
    together = max(1, EXPANDED_BYTES // (slots * (width + v_width) * own.element_size()))
    together = cdiv(heads, cdiv(heads, together))
    q = _joined(own, of_shared, width)
    attended = out
    if v_width != value_dim:
        attended = own.new_empty(num_rows, heads, v_width)
        attended[..., :value_dim] = out
    fixed = Fixed(
        key_dim, shared_dim, value_dim, rank, width, v_width, latents.shape[2], latents.shape[1],
        max(16, next_power_of_2(key_dim)), max(16, next_power_of_2(width - key_dim)),
        max(16, next_power_of_2(v_width)), precision(latents),
    )  # fmt: skip
    keys, values = (own.new_empty(slots * together * columns) for columns in (width, v_width))
    batch_of_pages = replace(batch, seq_lens=expansion.lengths, page_table=page_table)
    for first in range(0, heads, together):
        count = min(together, heads - first)
        group = slice(first, first + count)
        k_pages = keys[: slots * count * width].view(-1, _PAGE, count, width)
        v_pages = values[: slots * count * v_width].view(-1, _PAGE, count, v_width)
        _expand_kernel[(min(MULTIPROCESSORS, slots // _TILE * count),)](
            latents, batch.page_table, expansion.lengths, starts, seq_of_tile, num_tiles, k[group], v[group],
            k_pages, v_pages, count, batch.page_table.stride(0),
            TILE=_TILE, STEP=_STEP, STAGES=_STAGES, FIXED=fixed, num_warps=8,
        )  # fmt: skip
        call = AttentionCall(q[:, group], k_pages, v_pages, batch_of_pages, scale, attended[:, group])
        launch_prefill_hopper(call, skip_decodes=False)
    return out if attended is out else out.copy_(attended[..., :value_dim])


def _joined(own: Tensor, of_shared: Tensor, width: int) -> Tensor:
    """Queries ``[T, H, width]``, with zeros behind both parts; without a copy if the parts are neighbours."""
    (num_rows, heads, key_dim), both = own.shape, own.shape[2] + of_shared.shape[2]
    neighbours = own.data_ptr() + key_dim * own.element_size() == of_shared.data_ptr()
    if width == both and neighbours and own.stride() == of_shared.stride() == (own.stride(0), both, 1):
        return own.as_strided((num_rows, heads, both), own.stride())
    return torch.cat([own, of_shared, own.new_zeros(1, 1, 1).expand(num_rows, heads, width - both)], dim=-1)
