"""Attention over sliding windows in state slots: a decode kernel, a prefill kernel, and the stores of windows.

Job: ``weft/ops/window_attention`` on the GPU. Owns: tile shapes and grids. Does not know: layers.

The query heads that share a key head stand together as rows of one tile. A decoding row reads its own key and value
from the projection, and all others from its window. The program then replaces the entry that left the window, which no
program reads. A prefill reads tokens before the step from the window, and tokens of the step from the projection.
Launches after the prefill store the windows, checkpoints first, because these still need the old window.

Graph-safe: grids depend on padded sizes alone; which sequences prefill is read from the chunk table on the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.attention.prefill import prefill_tile
from weft.ops.attention.tiles import accumulate, sequence_of_block, start_softmax
from weft.ops.backend import launches
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, is_small, next_power_of_2, precision
from weft.ops.window_attention import window_attention, window_attention_decode

_LOWEST = tl.constexpr(-1e30)
"""Initial value of the running maximum: the first tiles of a row may hold no key that the row sees."""

_LEAST_SPLIT, _FILLED = 128, 256
"""Entries of a split, and programs that fill the device: windows are split among so many."""

_METADATA = [
    "chunk_seq", "chunk_start", "chunk_length", "checkpoint_slot", "first_chunk", "cu_seqlens_q", "seq_lens",
    "state_slots", "positions",
]  # fmt: skip


class Fixed(NamedTuple):
    """Compile-time parameters of the kernels.

    Attributes:
        head_dim, group, num_kv_heads, window: of the layer; so many query heads share a key head.
        tokens, rows, keys, block_d: of a tile.
        precision: of products of float32 operands.
        stages: of the pipeline.
        sinks: dimensions of the sinks: 1 by head, 2 by row and head, 0 without.
        keep_padding: leave the output of rows with slot 0 as it is.
        split: entries of a window that one program of the decode kernel takes.
        extent: the window if rows have a bias, else 0.
    """

    head_dim: int
    group: int
    num_kv_heads: int
    window: int
    tokens: int
    rows: int
    keys: int
    block_d: int
    precision: str
    stages: int
    sinks: int
    keep_padding: bool
    split: int
    extent: int


@triton.jit
def _load(k, v, rows, valid, dims, FIXED: tl.constexpr):
    """Keys and values ``[len(rows), BLOCK_D]``, from pointers to a head of row 0 and the rows' offsets."""
    mask = valid[:, None] & (dims < FIXED.head_dim)[None, :]
    offsets = rows[:, None] + dims[None, :]
    return tl.load(k + offsets, mask=mask, other=0.0), tl.load(v + offsets, mask=mask, other=0.0)


@jit(do_not_specialize_on_alignment=_METADATA)
def _window_decode_kernel(
    q, k, v, k_window, v_window, state_slots, positions, sinks, bias, out, partial, partial_lse, scale_log2, stride_q,
    stride_out, FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row, key head and split. The first split has the token itself and the sink."""
    enter(EARLY)
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    GROUP: tl.constexpr = FIXED.group
    WINDOW: tl.constexpr = FIXED.window
    ROWS: tl.constexpr = FIXED.rows
    KEYS: tl.constexpr = FIXED.keys
    PRECISION: tl.constexpr = FIXED.precision
    BLOCK_D: tl.constexpr = FIXED.block_d
    ENTRY: tl.constexpr = FIXED.num_kv_heads * HEAD_DIM
    SPLIT: tl.constexpr = FIXED.split
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    lanes, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    in_group = lanes < GROUP
    heads = kv_head * GROUP + lanes
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    inside = heads[:, None] * HEAD_DIM + dims[None, :]
    slot = tl.load(state_slots + row).to(tl.int64)
    if slot == 0:
        if not FIXED.keep_padding and split == 0:
            tl.store(out + row * stride_out + inside, tl.zeros(inside.shape, out.dtype.element_ty), mask=mask)
        return
    position = tl.load(positions + row)
    newest = (position % WINDOW).to(tl.int32)
    count = tl.minimum(position, WINDOW).to(tl.int32)  # entries that hold a token from before this step
    queries = tl.load(q + row * stride_q + inside, mask=mask, other=0.0)
    places = heads
    if FIXED.sinks == 2:
        places = row * FIXED.num_kv_heads * GROUP + heads
    acc, row_sum, row_max = start_softmax(sinks, places, in_group & (split == 0), ROWS, BLOCK_D, FIXED.sinks, _LOWEST)
    own = tl.arange(0, 16)  # as many as a matrix product takes
    p_new = row * ENTRY + kv_head * HEAD_DIM
    bias_rows = None
    if FIXED.extent > 0:
        p_bias = bias + (row * FIXED.num_kv_heads * GROUP + heads) * WINDOW
        bias_rows = (p_bias, tl.where(in_group, newest, -WINDOW))
    if split == 0:
        own_k, own_v = _load(k + p_new, v + p_new, own * 0, own == 0, dims, FIXED)
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, own_k, own_v, (own == 0)[None, :], scale_log2, PRECISION, True,
            newest + own, bias_rows, FIXED.extent,
        )  # fmt: skip
    p_window = slot * WINDOW * ENTRY + kv_head * HEAD_DIM
    end = tl.minimum(count, (split + 1) * SPLIT)
    for start in tl.range(split * SPLIT, end, KEYS, num_stages=FIXED.stages):
        entries = start + tl.arange(0, KEYS)
        valid = (entries < end) & (entries != newest)
        b_k, b_v = _load(k_window + p_window, v_window + p_window, entries * ENTRY, valid, dims, FIXED)
        before = tl.where(entries > newest, entries - WINDOW, entries)  # positions, less a multiple of the window
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, b_k, b_v, valid[None, :], scale_log2, PRECISION, True,
            before, bias_rows, FIXED.extent,
        )  # fmt: skip
    if SPLIT < WINDOW:
        place = (row * tl.num_programs(2) + split) * (FIXED.num_kv_heads * GROUP) + heads
        filled = tl.where(row_sum > 0.0, row_sum, 1.0)  # the window may not reach this far yet
        tl.store(partial_lse + place, tl.where(row_sum > 0.0, row_max + tl.log2(filled), _LOWEST), mask=in_group)
        acc = acc / filled[:, None]
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
    else:
        result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + row * stride_out + inside, result, mask=mask)
    if split > 0:
        return
    stored = p_window + newest * ENTRY + dims
    new_k = tl.load(k + p_new + dims, mask=dims < HEAD_DIM, other=0.0)
    new_v = tl.load(v + p_new + dims, mask=dims < HEAD_DIM, other=0.0)
    tl.store(k_window + stored, new_k.to(k_window.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(v_window + stored, new_v.to(v_window.dtype.element_ty), mask=dims < HEAD_DIM)


@jit(do_not_specialize_on_alignment=_METADATA)
def _window_merge_kernel(
    partial, partial_lse, state_slots, out, stride_out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row and head: its splits' results by their log-sum-exp. The decode kernel wrote rows of padding."""
    enter(EARLY, 64)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(state_slots + row) == 0:
        return
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    there = splits < SPLITS
    place = (row * SPLITS + splits) * HEADS + head
    lse = tl.load(partial_lse + place, mask=there, other=_LOWEST)
    weights = tl.where(there, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    values = tl.load(
        partial + place[:, None] * HEAD_DIM + dims[None, :], mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
    )
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    p_out = out + row * stride_out + head * HEAD_DIM + dims
    tl.store(p_out, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=_METADATA)
def _window_prefill_kernel(
    q, k, v, k_window, v_window, chunk_seq, first_chunk, cu_seqlens_q, seq_lens, state_slots, sinks, bias, out,
    scale_log2, num_seqs, stride_q,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens of one sequence that has chunks, and one key head."""
    enter(EARLY)
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    GROUP: tl.constexpr = FIXED.group
    WINDOW: tl.constexpr = FIXED.window
    TOKENS: tl.constexpr = FIXED.tokens
    ROWS: tl.constexpr = FIXED.rows
    KEYS: tl.constexpr = FIXED.keys
    PRECISION: tl.constexpr = FIXED.precision
    BLOCK_D: tl.constexpr = FIXED.block_d
    ENTRY: tl.constexpr = FIXED.num_kv_heads * HEAD_DIM
    kv_head, block = tl.program_id(0), tl.program_id(1)
    if tl.load(first_chunk + num_seqs) == 0:
        return
    first_seq = tl.load(chunk_seq)  # decodes, one token each, stand before it
    seq = sequence_of_block(cu_seqlens_q, block, first_seq, first_seq, num_seqs, TOKENS)
    begin = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - begin
    first = (block - ((begin - first_seq) // TOKENS + seq - first_seq)) * TOKENS
    if first >= query_len:
        return
    before = tl.load(seq_lens + seq) - query_len
    slot = tl.load(state_slots + seq).to(tl.int64)
    lanes, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    tokens = first + lanes // GROUP
    in_block = (lanes < TOKENS * GROUP) & (tokens < query_len)
    heads = kv_head * GROUP + lanes % GROUP
    mask = in_block[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (begin + tokens).to(tl.int64)[:, None]
    inside = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + rows * stride_q + inside, mask=mask, other=0.0)
    places = heads
    if FIXED.sinks == 2:
        places = (begin + tokens).to(tl.int64) * FIXED.num_kv_heads * GROUP + heads
    acc, row_sum, row_max = start_softmax(sinks, places, in_block, ROWS, BLOCK_D, FIXED.sinks, _LOWEST)
    bias_rows = None
    if FIXED.extent > 0:
        p_bias = bias + ((begin + tokens).to(tl.int64) * FIXED.num_kv_heads * GROUP + heads) * WINDOW
        bias_rows = (p_bias, tl.where(in_block, tokens, -1 - before))  # positions less those before the step
    p_window = slot * WINDOW * ENTRY + kv_head * HEAD_DIM
    # From the oldest token that the block sees. Tiles begin at multiples of their size, whatever the step.
    oldest = tl.maximum(0, before + first - WINDOW + 1) // KEYS * KEYS
    for start in tl.range(oldest, before, KEYS, num_stages=FIXED.stages):
        keys = start + tl.arange(0, KEYS)
        valid = keys < before
        b_k, b_v = _load(k_window + p_window, v_window + p_window, (keys % WINDOW) * ENTRY, valid, dims, FIXED)
        visible = valid[None, :] & (keys[None, :] > (before + tokens - WINDOW)[:, None])
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, b_k, b_v, visible, scale_log2, PRECISION, True,
            keys - before, bias_rows, FIXED.extent,
        )  # fmt: skip
    p_new = begin.to(tl.int64) * ENTRY + kv_head * HEAD_DIM
    end = tl.minimum(first + TOKENS, query_len)
    for start in tl.range(tl.maximum(0, first - WINDOW + 1) // KEYS * KEYS, end, KEYS, num_stages=FIXED.stages):
        keys = start + tl.arange(0, KEYS)
        b_k, b_v = _load(k + p_new, v + p_new, keys * ENTRY, keys < end, dims, FIXED)
        visible = (keys[None, :] <= tokens[:, None]) & (keys[None, :] > (tokens - WINDOW)[:, None])
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, b_k, b_v, visible, scale_log2, PRECISION, True,
            keys, bias_rows, FIXED.extent,
        )  # fmt: skip
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows * (FIXED.num_kv_heads * GROUP * HEAD_DIM) + inside, result, mask=mask)


@jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=_METADATA)
def _store_windows_kernel(
    k, v, k_window, v_window, chunk_seq, chunk_start, chunk_length, checkpoint_slot, first_chunk,
    cu_seqlens_q, seq_lens, state_slots, num_seqs,
    WINDOW: tl.constexpr, ENTRY: tl.constexpr, FINAL: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some entries of the window after one chunk, or (``FINAL``) after one sequence's last token."""
    enter(EARLY)
    target = tl.program_id(0)
    if FINAL:
        if tl.load(first_chunk + num_seqs) == 0:
            return
        seq = tl.load(chunk_seq) + target
        if seq >= num_seqs:
            return
        if tl.load(first_chunk + seq) == tl.load(first_chunk + seq + 1):
            return
        to_slot = tl.load(state_slots + seq)
    else:
        to_slot = tl.load(checkpoint_slot + target)
        if (to_slot < 0) | (tl.load(chunk_length + target) == 0):
            return
        seq = tl.load(chunk_seq + target)
    begin = tl.load(cu_seqlens_q + seq)
    before = tl.load(seq_lens + seq) - (tl.load(cu_seqlens_q + seq + 1) - begin)
    length = tl.load(seq_lens + seq)
    if not FINAL:
        length = before + tl.load(chunk_start + target) + tl.load(chunk_length + target) - begin
    entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    position = length - 1 - (length - 1 - entries + WINDOW) % WINDOW  # the newest that belongs to the entry
    position = tl.where(entries < WINDOW, position, -1)
    inner = (columns < ENTRY)[None, :]
    is_new = (position >= before)[:, None] & inner
    new = (begin + position - before).to(tl.int64)[:, None] * ENTRY + columns[None, :]
    inside = entries[:, None] * ENTRY + columns[None, :]
    to = to_slot.to(tl.int64) * WINDOW * ENTRY + inside
    b_k = tl.load(k + new, mask=is_new, other=0.0).to(k_window.dtype.element_ty)
    b_v = tl.load(v + new, mask=is_new, other=0.0).to(v_window.dtype.element_ty)
    stored = is_new
    if not FINAL:
        is_old = ((position >= 0) & (position < before))[:, None] & inner
        old = tl.load(state_slots + seq).to(tl.int64) * WINDOW * ENTRY + inside
        b_k = tl.where(is_new, b_k, tl.load(k_window + old, mask=is_old, other=0.0))
        b_v = tl.where(is_new, b_v, tl.load(v_window + old, mask=is_old, other=0.0))
        stored = is_new | is_old
    tl.store(k_window + to, b_k, mask=stored)
    tl.store(v_window + to, b_v, mask=stored)


def _fixed(
    q: Tensor,
    k_window: Tensor,
    rows: int,
    keys: int,
    stages: int,
    sinks: Tensor | None,
    bias: Tensor | None,
    keep_padding: bool,
    split: int | None = None,
) -> Fixed:
    _, window, num_kv_heads, head_dim = k_window.shape
    assert bias is None or (bias.is_contiguous() and bias.shape[2] == window)
    group = q.shape[1] // num_kv_heads
    return Fixed(
        head_dim, group, num_kv_heads, window, rows // group, rows, keys, max(16, next_power_of_2(head_dim)),
        precision(q), stages, 0 if sinks is None else sinks.dim(), keep_padding, window if split is None else split,
        0 if bias is None else window,
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, k_window: Tensor, v_window: Tensor) -> None:
    assert k.is_contiguous() and v.is_contiguous() and k_window.is_contiguous() and v_window.is_contiguous()
    assert q.stride(2) == 1 and q.stride(1) == q.shape[2] and k.dtype == v.dtype == q.dtype


@launches(window_attention_decode, invariant={"fixed": True})
def window_attention_decode_triton(
    q, k, v, windows, state_slots, positions, *, scale, terms, out, fixed: bool = False
) -> Tensor:
    """``fixed``: splits do not follow the rows."""
    (k_window, v_window), (sinks, bias) = windows, terms
    _check(q, k, v, k_window, v_window)
    keep, out = out is not None, torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    head_dim, element = q.shape[2], q.element_size()
    rows = max(16, next_power_of_2(q.shape[1] // k_window.shape[2]))
    keys = max(16, min(64, 32768 // (next_power_of_2(head_dim) * element)))
    stages = 2 if element == 4 or head_dim > 128 else 3
    (_, window, num_kv_heads, _), (num_rows, num_heads, _) = k_window.shape, q.shape
    split = window_split(window, 0 if fixed else num_rows * num_kv_heads)
    parameters, num_splits = _fixed(q, k_window, rows, keys, stages, sinks, bias, keep, split), cdiv(window, split)
    shape = (num_rows, num_splits, num_heads) if num_splits > 1 else (1, 1, 1)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _window_decode_kernel[(num_kv_heads, num_rows, num_splits)](
        q, k, v, k_window, v_window, state_slots, positions, q if sinks is None else sinks, bias, out,
        partial, partial_lse,
        scale * LOG2_E.value, q.stride(0), out.stride(0), FIXED=parameters, num_warps=4, **early_launch(q.device),
    )  # fmt: skip
    if num_splits > 1:
        _window_merge_kernel[(num_heads, num_rows)](
            partial, partial_lse, state_slots, out, out.stride(0),
            HEADS=num_heads, HEAD_DIM=head_dim, SPLITS=num_splits, BLOCK_SPLITS=next_power_of_2(num_splits),
            BLOCK_D=parameters.block_d, num_warps=2, **early_launch(q.device),
        )  # fmt: skip
    return out


def window_split(window: int, num_programs: int) -> int:
    """Entries of a split, for so many rows times key heads: the window, unless that leaves multiprocessors idle."""
    return min(window, max(_LEAST_SPLIT, next_power_of_2(max(1, cdiv(window * num_programs, _FILLED)))))


@launches(window_attention, invariant={"fixed": True})
def window_attention_triton(
    q, k, v, k_window, v_window, batch, *, scale, sinks, bias, fixed: bool = False
) -> Tensor:  # fmt: skip
    """``fixed``: one tile for any number of rows."""
    _check(q, k, v, k_window, v_window)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    chunks = batch.chunk_table
    (_, window, num_kv_heads, head_dim), num_seqs = k_window.shape, chunks.first.shape[0] - 1
    num_rows, group, small = 1 if fixed else q.shape[0], q.shape[1] // num_kv_heads, is_small(q.device)
    tile = prefill_tile(num_rows, q.shape[1], q.shape[2], group, q.element_size(), small=small)
    parameters = _fixed(q, k_window, tile.rows, tile.keys, tile.stages, sinks, bias, keep_padding=False)
    tables = (chunks.seq, chunks.first, batch.cu_seqlens_q, batch.seq_lens, batch.state_slots)
    _window_prefill_kernel[(num_kv_heads, q.shape[0] // parameters.tokens + chunks.max_seqs + 1)](
        q, k, v, k_window, v_window, *tables, q if sinks is None else sinks, bias, out, scale * LOG2_E.value, num_seqs,
        q.stride(0),
        FIXED=parameters, num_warps=tile.warps, **early_launch(q.device),
    )  # fmt: skip
    entry = num_kv_heads * head_dim
    columns = min(512, next_power_of_2(entry))
    for targets, final in ((chunks.seq.shape[0], False), (chunks.max_seqs, True)):
        _store_windows_kernel[(targets, cdiv(window, 16), cdiv(entry, columns))](
            k, v, k_window, v_window, chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first,
            batch.cu_seqlens_q, batch.seq_lens, batch.state_slots, num_seqs,
            WINDOW=window, ENTRY=entry, FINAL=final, ENTRIES=16, COLUMNS=columns, num_warps=4, **early_launch(q.device),
        )  # fmt: skip
    return out
