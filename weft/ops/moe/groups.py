"""Grouping of (token, expert) pairs by expert, in blocks of equal length.

Job: the grouping that all expert kernels share. Owns: the order of pairs and the table of blocks. Does not know:
weights, products. Inputs of FP8 products are quantised by further programs of the first launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.fp8.quantize import Pass, no_pass, quantize_nth_tile
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_PAIRS = 256
"""Pairs per program of the grouping kernels."""

FEW_PAIRS = 256
"""Upper bound on pairs that are grouped in one launch, in which every program reads all pairs. On an H200 with 512
experts and 10 per token, one launch gained 3 us at 4 and 8 tokens and 2 us at 16. It gained nothing at 32 tokens and
lost 3 us at 64."""

MANY_PAIRS = 16384
"""With more pairs every expert's counter has a cache line of its own. Shared lines then cost more than to read a line
per expert. With 512 experts on an H200 the first launch takes 1.7 us instead of 4.3 at 20,480 pairs, 3.2 instead of
13.9 at 81,920."""

_LINE = 32
"""int32 of a cache line."""


@jit(do_not_specialize=["num_rows", "stride_group", "num_pairs"])
def _rank_kernel(
    ids, counts, ranks, x, input_scale, values, scales, num_rows, stride_x, stride_group, num_pairs,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, QUANTIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Number and count the pairs of each expert in order of arrival; then quantise inputs."""
    enter(EARLY)
    first = tl.program_id(0) * BLOCK
    if first < num_pairs:
        pair = first + tl.arange(0, BLOCK)
        expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        rank = tl.atomic_add(counts + expert * STRIDE, 1, mask=expert >= 0, sem="relaxed")
        tl.store(ranks + pair, rank, mask=expert >= 0)
    elif QUANTIZED.width > 0:
        inputs = (x, input_scale, values, scales, num_rows, stride_x, stride_group)
        quantize_nth_tile(inputs, tl.program_id(0) - tl.cdiv(num_pairs, BLOCK), QUANTIZED)


@jit
def _block_kernel(
    counts, first_place, block_expert, block_first, num_blocks,
    NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e writes where the places of expert e begin, and its blocks: the expert, and the first place."""
    enter(EARLY)
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_E)
    count = tl.load(counts + others * STRIDE, mask=others < NUM_EXPERTS, other=0)
    blocks = (count + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(others < expert, blocks, 0), 0)
    first = tl.sum(tl.where(others < expert, count, 0), 0)
    mine = tl.sum(tl.where(others == expert, count, 0), 0)
    tl.store(first_place + expert, first)
    if expert == NUM_EXPERTS - 1:
        tl.store(first_place + NUM_EXPERTS, first + mine)
        tl.store(num_blocks, tl.sum(blocks, 0))
    for start in range(0, tl.cdiv(mine, ROWS), 16):
        block = start + tl.arange(0, 16)
        inside = block * ROWS < mine
        tl.store(block_expert + first_block + block, expert + tl.zeros([16], dtype=tl.int32), mask=inside)
        tl.store(block_first + first_block + block, first + block * ROWS, mask=inside)


@jit(do_not_specialize=["num_pairs"])
def _place_kernel(ids, ranks, first_place, pairs, num_pairs, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Put each pair in its place."""
    enter(EARLY)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    rank = tl.load(ranks + pair, mask=expert >= 0, other=0)
    first = tl.load(first_place + expert, mask=expert >= 0, other=0)
    tl.store(pairs + first + rank, pair, mask=expert >= 0)


@triton.jit
def _group_expert(
    expert, ids, pairs, first_place, block_expert, block_first, num_blocks, num_pairs,
    NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the pairs of an expert and write their places and blocks. A block has the number of its first place, and the
    numbers of the other places are of blocks without an expert."""
    pair = tl.arange(0, BLOCK)
    theirs = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    mine = theirs == expert
    first = tl.sum(((theirs >= 0) & (theirs < expert)).to(tl.int32), 0)
    end = first + tl.sum(mine.to(tl.int32), 0)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    place = first + rank
    tl.store(pairs + place, pair, mask=mine)
    tl.store(block_expert + place, tl.where(rank % ROWS == 0, expert, -1), mask=mine)
    tl.store(block_first + place, place, mask=mine)
    tl.store(first_place + expert + 1, end)
    if expert == NUM_EXPERTS - 1:
        tl.store(num_blocks, end)


@jit(do_not_specialize=["num_rows", "stride_group", "num_pairs"])
def _few_kernel(
    ids, pairs, first_place, block_expert, block_first, num_blocks, x, input_scale, values, scales, num_rows, stride_x,
    stride_group, num_pairs,
    NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program for each expert; then quantise inputs."""
    enter(EARLY)
    program = tl.program_id(0)
    if program < NUM_EXPERTS:
        _group_expert(
            program, ids, pairs, first_place, block_expert, block_first, num_blocks, num_pairs, NUM_EXPERTS, ROWS, BLOCK
        )
    elif QUANTIZED.width > 0:
        inputs = (x, input_scale, values, scales, num_rows, stride_x, stride_group)
        quantize_nth_tile(inputs, program - NUM_EXPERTS, QUANTIZED)


def group_pairs(ids: Tensor, num_experts: int, rows: int, inputs: Pass | None = None) -> tuple[tuple[Tensor, ...], int]:
    """Pairs by expert and the table of blocks, and the most blocks that any routing can need.

    ``inputs``: a pass over the inputs of FP8 products, done by further programs of the first launch. The order of an
    expert's pairs may change from run to run; no result depends on it, as every row is computed alike.
    """
    return (_group_few if ids.numel() <= FEW_PAIRS else group_many)(ids, num_experts, rows, inputs or no_pass(ids))


def _parts(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Neighbours in one buffer, each aligned to 16 bytes, whatever the number of tokens."""
    padded = [-(-size // 4) * 4 for size in sizes]
    return torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)


def _group_few(ids: Tensor, num_experts: int, rows: int, inputs: Pass) -> tuple[tuple[Tensor, ...], int]:
    num_pairs = ids.numel()
    grouping = _parts((num_pairs, num_experts + 1, num_pairs, num_pairs, 1), ids.device)
    _few_kernel[(num_experts + inputs.programs,)](
        ids, *grouping, *inputs.args, num_pairs,
        NUM_EXPERTS=num_experts, ROWS=rows, BLOCK=FEW_PAIRS, QUANTIZED=inputs.fixed, num_warps=1,
        **early_launch(ids.device),
    )  # fmt: skip
    return grouping, num_pairs


def group_many(ids: Tensor, num_experts: int, rows: int, inputs: Pass) -> tuple[tuple[Tensor, ...], int]:
    """``group_pairs`` with a table in which every block has an expert."""
    num_pairs = ids.numel()
    most_hit = min(num_experts, num_pairs)
    max_blocks = min(num_pairs, (num_pairs + (rows - 1) * most_hit) // rows)
    sizes = (num_pairs, num_pairs, num_experts + 1, max_blocks, max_blocks, 1)
    ranks, pairs, first_place, block_expert, block_first, num_blocks = _parts(sizes, ids.device)
    stride = _LINE if num_pairs > MANY_PAIRS else 1
    counts = torch.zeros(num_experts * stride, dtype=torch.int32, device=ids.device)
    programs = cdiv(num_pairs, _PAIRS)
    _rank_kernel[(programs + inputs.programs,)](
        ids, counts, ranks, *inputs.args, num_pairs,
        BLOCK=_PAIRS, STRIDE=stride, QUANTIZED=inputs.fixed, num_warps=4, **early_launch(ids.device),
    )  # fmt: skip
    _block_kernel[(num_experts,)](
        counts, first_place, block_expert, block_first, num_blocks,
        NUM_EXPERTS=num_experts, ROWS=rows, STRIDE=stride, BLOCK_E=next_power_of_2(num_experts), num_warps=1,
        **early_launch(ids.device),
    )  # fmt: skip
    _place_kernel[(programs,)](
        ids, ranks, first_place, pairs, num_pairs, BLOCK=_PAIRS, num_warps=4, **early_launch(ids.device)
    )
    return (pairs, first_place, block_expert, block_first, num_blocks), max_blocks
