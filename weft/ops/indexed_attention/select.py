"""The selection of pools on the GPU: one kernel for scores, one for the best of them.

Job: ``select_pools``. Owns: tile shapes, the memory for scores. Does not know: layers, or who filled the pages.

The best are found without sorting. Scores become integers of the same order, and a search by bits from the highest
finds the smallest selected one. A program holds the scores of a token in its registers, up to ``_HELD``.

Graph-safe: grids depend on padded sizes alone; which rows are real, and their lengths, are read on the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.indexed_attention import select_pools
from weft.ops.indexed_attention.tokens import METADATA, is_decode, longest, metadata, place_of
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit, new_indices
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision

_SCORES = 1 << 26
"""Scores that are stored at a time, at most, if a token has fewer: 256 MiB."""
_HELD = 32768
"""Scores of a token that a program holds in its registers. It reads the scores of longer sequences once per bit."""
_FEW = 4096
"""Scores of a token that a program holds if there are no more."""
_PROGRAMS = 2048
"""Programs of the kernel for scores, about. Each walks through the keys of its tokens with a stride."""


class Fixed(NamedTuple):
    """Compile-time parameters: of the layer, and of a tile of ``tokens`` tokens and ``keys`` pools."""

    num_heads: int
    dim: int
    pool: int
    page_size: int
    weighted: bool
    tokens: int
    keys: int
    block_h: int
    block_d: int
    precision: str


@jit(
    do_not_specialize=["first_row", "end_row", "num_seqs", "stride_table", "stride_scores"],
    do_not_specialize_on_alignment=METADATA,
)
def _scores_kernel(
    q, weights, cache, scores, page_table, seq_lens, cu_seqlens_q, counts, num_seqs, stride_table, first_row, end_row,
    stride_q, stride_weights, stride_scores,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Scores of some tokens for every ``num_programs(1)``-th tile of the pools of their sequences."""
    enter(EARLY)
    DIM: tl.constexpr = FIXED.dim
    POOL: tl.constexpr = FIXED.pool
    PER_PAGE: tl.constexpr = FIXED.page_size // FIXED.pool
    KEYS: tl.constexpr = FIXED.keys
    first = first_row + tl.program_id(0) * FIXED.tokens
    end = tl.minimum(first + FIXED.tokens, end_row)
    heads, dims = tl.arange(0, FIXED.block_h), tl.arange(0, FIXED.block_d)
    in_heads, in_dim = heads < FIXED.num_heads, dims < DIM
    token = first
    while token < end:  # a tile may hold tokens of several sequences
        seq, position = place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs)
        last = token + 1
        if position >= 0:
            last = tl.minimum(end, tl.load(cu_seqlens_q + seq + 1))
            table = page_table + seq.to(tl.int64) * stride_table
            num_pools = (position + last - token) // POOL
            for start in range(tl.program_id(1) * KEYS, num_pools, tl.num_programs(1) * KEYS):
                pools = start + tl.arange(0, KEYS)
                inside = pools < num_pools
                page = tl.load(table + pools // PER_PAGE, mask=inside, other=0).to(tl.int64)
                rows = cache + (page * PER_PAGE + pools % PER_PAGE)[:, None] * DIM
                keys = tl.load(rows + dims[None, :], mask=inside[:, None] & in_dim[None, :], other=0.0)
                for i_row in range(token, last):
                    row = tl.cast(i_row, tl.int64)
                    of_heads = q + row * stride_q + heads[:, None] * DIM
                    queries = tl.load(of_heads + dims[None, :], mask=in_heads[:, None] & in_dim[None, :], other=0.0)
                    by_head = tl.dot(queries, tl.trans(keys), input_precision=FIXED.precision)
                    by_head = tl.maximum(by_head, 0.0)
                    if FIXED.weighted:
                        p_weights = weights + row * stride_weights + heads
                        by_head *= tl.load(p_weights, mask=in_heads, other=0.0).to(tl.float32)[:, None]
                    target = scores + (row - first_row) * stride_scores + pools
                    tl.store(target, tl.sum(by_head, 0), mask=inside)
        token = last


@triton.jit
def _ordered(scores, inside):
    """Integers of the order of float32 ``scores``, from 1 to 2^32 - 2 (NaN included); 0 outside."""
    bits = scores.to(tl.uint32, bitcast=True)
    ordered = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(inside, tl.minimum(tl.maximum(ordered, 1), 0xFFFFFFFE), 0)


@triton.jit
def _reached(scores, bound, step):
    """Packed numbers of scores of at least ``bound + step``, of two and of three steps: 21 bits each."""
    one, two = scores >= bound + step, scores >= bound + 2 * step
    three = scores >= bound + 3 * step
    return tl.sum(one.to(tl.int64) + (two.to(tl.int64) << 21) + (three.to(tl.int64) << 42), 0)


@triton.jit
def _count_from(row, num_pools, bound, step, held, HELD: tl.constexpr, MANY: tl.constexpr):
    """``_reached`` of all scores, of which ``held`` are the first ``HELD``."""
    counts = _reached(held, bound, step)
    if MANY:
        for start in range(HELD, num_pools, HELD):
            places = start + tl.arange(0, HELD)
            inside = places < num_pools
            more = _ordered(tl.load(row + places, mask=inside, other=0.0), inside)
            counts += _reached(more, bound, step)
    return (counts & 0x1FFFFF).to(tl.int32), ((counts >> 21) & 0x1FFFFF).to(tl.int32), (counts >> 42).to(tl.int32)


@triton.jit
def _select_best(
    row, out, num_pools, COUNT: tl.constexpr, FEW: tl.constexpr, HELD: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """Write the places of the ``COUNT`` largest of more scores, in ascending order. The first of equal scores count.

    Prefix sums take many registers, so they run over ``FEW`` scores at a time.
    """
    first = tl.arange(0, HELD)
    held = _ordered(tl.load(row + first, mask=first < num_pools, other=0.0), first < num_pools)
    least = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x40000000, tl.uint32)
    found = num_pools
    while (step != 0) & (found != COUNT):  # two bits at a time
        one, two, three = _count_from(row, num_pools, least, step, held, HELD, MANY)
        if three >= COUNT:
            least = least + 3 * step
            found = three
        elif two >= COUNT:
            least = least + 2 * step
            found = two
        elif one >= COUNT:
            least = least + step
            found = one
        step = step >> 2
    # Scores above the bound are all selected, and as many equal to it as there is room for.
    above_bound, _two, _three = _count_from(row, num_pools, least, tl.full([], 1, tl.uint32), held, HELD, MANY)
    equal_room = COUNT - above_bound
    if found == COUNT:
        equal_room = 0
        least = least - 1
    above_before = 0
    equal_before = 0
    for start in range(0, num_pools, FEW):
        at = start + tl.arange(0, FEW)
        inside = at < num_pools
        values = _ordered(tl.load(row + at, mask=inside, other=0.0), inside)
        above, equal = values > least, (values == least) & (least > 0)
        ranks = tl.cumsum(above.to(tl.uint32) + (equal.to(tl.uint32) << 16), 0)
        above_rank = above_before + (ranks & 0xFFFF).to(tl.int32)
        equal_rank = equal_before + (ranks >> 16).to(tl.int32)
        selected = above | (equal & (equal_rank <= equal_room))
        tl.store(out + above_rank + tl.minimum(equal_rank, equal_room) - 1, at, mask=selected)
        above_before += tl.sum(above.to(tl.int32), 0)
        equal_before += tl.sum(equal.to(tl.int32), 0)


@jit(do_not_specialize=["first_row", "num_seqs", "stride_scores"], do_not_specialize_on_alignment=METADATA)
def _best_kernel(
    scores, selected, seq_lens, cu_seqlens_q, counts, num_seqs, first_row, stride_scores,
    COUNT: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, HELD: tl.constexpr,
    MANY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best pools of one token."""
    enter(EARLY)
    token = first_row + tl.program_id(0)
    _seq, position = place_of(token, seq_lens, cu_seqlens_q, counts, num_seqs)
    num_pools = (position + 1) // POOL
    row = scores + tl.program_id(0).to(tl.int64) * stride_scores
    out = selected + token.to(tl.int64) * COUNT
    if num_pools <= COUNT:
        places = tl.arange(0, BLOCK)
        tl.store(out + places, tl.where(places < num_pools, places, -1), mask=places < COUNT)
    elif num_pools <= FEW:
        _select_best(row, out, num_pools, COUNT, FEW, FEW, False)
    else:
        _select_best(row, out, num_pools, COUNT, FEW, HELD, MANY)


@launches(select_pools)
def select_pools_triton(q, weights, cache, batch, *, pool, count) -> Tensor:
    num_rows, num_heads, dim = q.shape
    page_size = cache.shape[1]
    assert cache.is_contiguous() and q.stride(2) == 1 and q.stride(1) == dim
    assert weights is None or weights.stride(1) == 1
    selected = new_indices(num_rows, count, dtype=torch.int32, device=q.device)
    num_pools = max(1, longest(batch, page_size) // pool)
    step = min(num_rows, max(1, _SCORES // num_pools))
    scores = torch.empty(step, num_pools, dtype=torch.float32, device=q.device)
    tokens = 1 if is_decode(batch) else 16
    block_d = max(16, next_power_of_2(dim))
    fixed = Fixed(
        num_heads, dim, pool, page_size, weights is not None, tokens, 64, max(16, next_power_of_2(num_heads)), block_d,
        precision(q),
    )  # fmt: skip
    table, seq_lens, cu_seqlens_q, counts, num_seqs, stride = metadata(batch)
    head_weights, stride_weights = (q, 0) if weights is None else (weights, weights.stride(0))
    most = max(1, batch.page_table.shape[1] * page_size // pool)  # the same in every step, as kernels are compiled once
    held = min(_HELD, max(16, next_power_of_2(most)))
    for first in range(0, num_rows, step):
        end = min(num_rows, first + step)
        tiles = cdiv(end - first, tokens)
        programs = min(cdiv(num_pools, fixed.keys), max(1, _PROGRAMS // tiles))
        _scores_kernel[(tiles, programs)](
            q, head_weights, cache, scores, table, seq_lens, cu_seqlens_q, counts, num_seqs, stride, first, end,
            q.stride(0), stride_weights, num_pools,
            FIXED=fixed, num_warps=4, **early_launch(q.device),
        )  # fmt: skip
        _best_kernel[(end - first,)](
            scores, selected, seq_lens, cu_seqlens_q, counts, num_seqs, first, num_pools,
            COUNT=count, POOL=pool, BLOCK=next_power_of_2(count), FEW=min(held, _FEW), HELD=held, MANY=most > held,
            num_warps=32 if held > _FEW else 8, **early_launch(q.device),
        )  # fmt: skip
    return selected
