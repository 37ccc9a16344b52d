"""Shared parts of the paged attention kernels: tiles, loads of keys and values, one step of the online softmax.

Job: the parts below ``decode.py``, ``prefill.py`` and ``prefill_hopper.py``. Owns: the
arithmetic of a tile. Does not know: which rows form a tile, grids.

Softmax is computed online (FlashAttention-2, arXiv 2307.08691) in base 2.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from weft.forward_context import Batch
from weft.ops.attention import AttentionCall
from weft.ops.fp8 import E4M3
from weft.ops.triton.elementwise import LOG2_E

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

METADATA = ["page_table", "seq_lens", "cu_seqlens_q", "counts"]
"""Slices of a step's packed buffer, so their alignment changes from step to step: no reason to compile again."""


class Tile(NamedTuple):
    """Rows (query token, head) and keys of one tile, warps and pipeline stages.

    Only the decode kernel uses the last three. ``ahead``: load page ids a step before their keys (shorter waits, more
    registers). Sequences of up to ``held_splits`` splits load ``held_keys`` keys of each split before the previous
    kernel has ended.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    ahead: bool = True
    held_splits: int = 0
    held_keys: int = 0


def prefilled(batch: Batch, *, skip_decodes: bool) -> tuple[Tensor, int, int]:
    """``counts``, ``num_seqs`` and ``least_tokens`` of a prefill kernel, which takes sequences with at least so many
    query tokens, as numbers and not as constants: it takes seconds to compile. If ``num_seqs`` is negative, ``counts``
    holds it, and how many sequences at the front decode, which are the other kernel's."""
    if batch.mixed is not None:
        return batch.mixed.counts, -1, 1
    return batch.seq_lens, batch.seq_lens.shape[0], 2 if skip_decodes else 1


@triton.jit
def sequence_of_block(cu_seqlens_q, block, first_seq, first_token, num_seqs, TOKENS: tl.constexpr):
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


@triton.jit
def load_keys_values(cache, page, tokens, valid, dims, FIXED: tl.constexpr, MASKED: tl.constexpr):
    """Keys and values of some tokens, in the given pages, of one key head: two ``[len(tokens), BLOCK_D]`` tiles.

    ``cache``: the head's keys, its values, the sequence's page table (not used), and the stride from slot to slot;
    ``FIXED`` has ``head_dim``, ``page_size`` and ``block_d``.
    """
    k_cache, v_cache, _table, stride_slot = cache
    HEAD_DIM: tl.constexpr = FIXED.head_dim
    BLOCK_D: tl.constexpr = FIXED.block_d
    offsets = (page.to(tl.int64) * FIXED.page_size + tokens % FIXED.page_size)[:, None] * stride_slot + dims[None, :]
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
def start_softmax(
    sinks, places, valid, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, LOWEST: tl.constexpr
):
    """The online softmax of rows before their first key: ``(acc, row_sum, row_max)``. A row with a sink has seen a key
    whose value is zero.

    Args:
        sinks: of all heads, or of all rows and heads, read if ``SINKS``; those at ``places`` count in rows that are
            ``valid``.
        LOWEST: the maximum of nothing; finite where a row's first tile may hold no key that it sees.
    """
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], LOWEST, dtype=tl.float32)
    if SINKS:
        scores = tl.load(sinks + places, mask=valid, other=0.0).to(tl.float32)
        row_max = tl.where(valid, scores * LOG2_E, LOWEST)
        row_sum += tl.where(valid, 1.0, 0.0)
    return acc, row_sum, row_max


@triton.jit
def widen_values(v, dtype: tl.constexpr):
    """``v [keys, D]`` in another dtype. e4m3 is converted to float16 in the layout in which it was loaded. The compiler
    would first convert to the operand's layout, in which each value is one load of a byte. It moves no assembly."""
    if v.dtype == tl.float8e4nv and dtype == tl.float16 and not _INTERPRETED:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [v], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        wide = v.to(dtype)
    return wide


@triton.jit
def accumulate(
    acc, row_sum, row_max, q, k, v, visible, scale_log2, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    keys=None, bias=None, EXTENT: tl.constexpr = 0,
):  # fmt: skip
    """Compute one step of the online softmax. Every row has seen a visible key by the end of the first step.

    With ``EXTENT``, scores of ``keys`` (positions) less than ``EXTENT`` tokens back are increased. ``bias``: where the
    numbers of each row begin, and the row's position, which is negative in rows without numbers.
    """
    if k.dtype == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # holds all e4m3 numbers, and one instruction widens two of them; bfloat16 takes several
    k, v = k.to(q.dtype), widen_values(v, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if EXTENT > 0:
        distance = bias[1][:, None] - keys[None, :]
        near = (distance >= 0) & (distance < EXTENT)
        scores += tl.load(bias[0][:, None] + distance, mask=near, other=0.0).to(tl.float32)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shrink = tl.exp2(row_max - new_max)
    p = tl.exp2(scores * scale_log2 - new_max[:, None])
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, row_sum, new_max


@triton.jit
def first_pages(table, first, end, FIXED: tl.constexpr):
    """The pages of a range's first tile, if pages are loaded ahead."""
    tokens = first + tl.arange(0, FIXED.keys)
    return tl.load(table + tokens // FIXED.page_size, mask=FIXED.ahead & (tokens < end), other=0)


@triton.jit
def accumulate_range(
    softmax, queries, cache, page, first, end, last_seen, dims, scale_log2, FIXED: tl.constexpr, bias=None
):  # fmt: skip
    """The online softmax over the tokens from ``first`` to ``end``; ``page``: of the first tile, if loaded ahead."""
    KEYS: tl.constexpr = FIXED.keys
    PAGE_SIZE: tl.constexpr = FIXED.page_size
    PRECISION: tl.constexpr = FIXED.precision  # Triton 3.6 passes no text of a tuple to a function
    table = cache[2]
    acc, row_sum, row_max = softmax
    next_page = page
    for start in tl.range(first, end, KEYS, num_stages=FIXED.stages):
        tokens = start + tl.arange(0, KEYS)
        valid = tokens < end
        if FIXED.ahead:
            page = next_page
            ahead = tokens + KEYS
            next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)
        else:
            page = tl.load(table + tokens // PAGE_SIZE, mask=valid, other=0)
        k, v = load_keys_values(cache, page, tokens, valid, dims, FIXED, True)
        visible = valid[None, :]
        if FIXED.query_len > 1:
            visible = visible & (tokens[None, :] <= last_seen[:, None])
        acc, row_sum, row_max = accumulate(
            acc, row_sum, row_max, queries, k, v, visible, scale_log2, PRECISION, True, tokens, bias, FIXED.extent
        )  # fmt: skip
    return acc, row_sum, row_max


def check_layout(call: AttentionCall) -> None:
    """Caches are contiguous; rows of q and out may be strided, their heads are dense."""
    q, k_cache, v_cache, _, _, out, *_ = call
    assert call.bias is None or call.bias.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.dtype == v_cache.dtype and k_cache.dtype in (q.dtype, E4M3)
    assert all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, out))
