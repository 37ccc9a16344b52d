"""Sampling kernels: one pass over the logits, and a search for the filters' threshold without sorting.

Job: ``sample`` of ``weft/ops/sampling.py`` on the GPU, with the random numbers defined there, bit for bit. Owns: the
search. Does not know: penalties, masks, requests.

All three filters keep what lies above some value of the row, its threshold, searched only if some row has a filter:

    groups     the largest logit of every group of 32 tokens, and the mass of every block
    select     the (up to) 256 groups with the largest maxima: what they hold above the next maximum are the likeliest
               tokens of the row, without exception
    threshold  bisection over those, in registers. If they do not reach far enough (a flat distribution, a large k), the
               bisection reads the whole row in every step. Each step ends at values that occur, so it stops when none
               lies between.

Then every row is sampled:

    draw       programs per block of tokens: its largest logit, and its best score. Greedy: the logit. Otherwise
               ``logit / temperature - log(E)``, the logarithm of ``p / E`` up to a constant of the row (Gumbel-max).
    pick       one program per row: the best block, the lower id among equals; and whether the largest logit is finite.

Sums run in a fixed order inside a row, so a row's token depends on nothing else in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.sampling_params import GREEDY_BELOW

_DRAW_BLOCK = 2048
_GROUP = 32
_GROUPS = 256

_SCRATCH = ["group_max", "block_max", "block_mass", "block_finite", "selected", "floors"]
"""Parts of one buffer, aligned as the number of rows has it: no reason to compile again."""


@triton.jit
def _mix(x):
    """lowbias32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_words(seed, position, tokens):
    """The 32-bit hash of (seed, position, token): uint32, shaped like ``tokens``."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first = _mix(_mix(_mix(low ^ 0x243F6A88) ^ high) ^ place)
    second = _mix(_mix(_mix(low ^ 0x85A308D3) ^ high) ^ place) | 1
    return _mix((_mix(tokens.to(tl.uint32)) ^ first) * second)


@triton.jit
def exponential(words):
    """``-log1p(-u)`` of the uniform number ``u`` of a word, exact near 0 where the sample is decided."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # -log(1 - u) = u + u^2 / 2 + u^3 / 3 ...; beyond a quarter, log has no trouble. Cut off below 1e-8.
    series = 1.0 / 12.0
    for term in tl.static_range(11):
        series = series * u + 1.0 / (11 - term)
    return tl.where(u <= 0.25, u * series, -tl.log(1.0 - u))


@triton.jit
def _probe(row, inverse, largest, value, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """About the scaled logits at or above ``value``: how many, their mass, the smallest; and the largest one below."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        tokens = start + lanes
        x = tl.load(row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32) * inverse
        above = x >= value
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(x - largest), 0.0)
        smallest = tl.where(above, tl.minimum(smallest, x), smallest)
        below = tl.where(above, below, tl.maximum(below, x))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(smallest, 0), tl.max(below, 0)


@triton.jit
def _probe_held(values, masses, value):
    """``_probe`` over values held in registers."""
    above = values >= value
    count = tl.sum(above.to(tl.int32), 0)
    mass = tl.sum(tl.where(above, masses, 0.0), 0)
    smallest = tl.min(tl.where(above, values, float("inf")), 0)
    below = tl.max(tl.where(above, float("-inf"), values), 0)
    return count, mass, smallest, below


@triton.jit
def _search(
    row, inverse, values, masses, largest, lowest, enough,
    BY_COUNT: tl.constexpr, HELD: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest value v of the row (of ``values`` if HELD) with ``count(x >= v)`` (or mass) at least ``enough``.

    ``lowest`` is a value for which that holds.
    """
    low = lowest  # the answer is a value in [low, high]
    high = largest
    middle = largest
    while low < high:
        if HELD:
            count, mass, smallest, below = _probe_held(values, masses, middle)
        else:
            count, mass, smallest, below = _probe(row, inverse, largest, middle, VOCAB, BLOCK)
        if BY_COUNT:
            holds = count.to(tl.float32) >= enough
        else:
            holds = mass >= enough
        low = tl.where(holds, smallest, low)
        high = tl.where(holds, high, tl.maximum(below, low))
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
    return low


@triton.jit
def _filters(
    row, inverse, values, masses, largest, lowest, total, top_k, top_p,
    HELD: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Threshold of top-k (0: none), then of top-p among what top-k keeps, not below ``lowest``."""
    threshold = lowest
    if top_k > 0:
        k = top_k.to(tl.float32)
        threshold = _search(row, inverse, values, masses, largest, lowest, k, True, HELD, VOCAB, BLOCK)
        if HELD:
            count, total, _smallest, _below = _probe_held(values, masses, threshold)
        else:
            count, total, _smallest, _below = _probe(row, inverse, largest, threshold, VOCAB, BLOCK)
        # Of the tokens that equal the k-th, only as many count as there is room for.
        total -= (count - top_k).to(tl.float32) * tl.exp(threshold - largest)
    if top_p < 1.0:
        enough = top_p * total
        threshold = _search(row, inverse, values, masses, largest, threshold, enough, False, HELD, VOCAB, BLOCK)
    return threshold


@triton.jit
def _is_filtered(temperatures, top_ks, top_ps, min_ps, index, GREEDY_BELOW: tl.constexpr, VOCAB: tl.constexpr):
    """``(1 / temperature, top_k or 0, top_p, min_p, whether any filter is on)`` of a row."""
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    top_k = tl.where((top_k > 0) & (top_k < VOCAB), top_k, 0).to(tl.int32)
    filtered = (temperature >= GREEDY_BELOW) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return 1.0 / temperature, top_k, top_p, min_p, filtered


@jit(do_not_specialize_on_alignment=_SCRATCH)
def _groups_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, group_max, block_max, block_mass, block_finite, stride,
    GREEDY_BELOW: tl.constexpr, VOCAB: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    block = tl.program_id(0)
    index = tl.program_id(1)
    inverse, _k, _p, _m, filtered = _is_filtered(temperatures, top_ks, top_ps, min_ps, index, GREEDY_BELOW, VOCAB)
    if filtered:
        per_block: tl.constexpr = BLOCK // GROUP
        groups = tl.arange(0, per_block)
        tokens = block * BLOCK + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        row = logits + index.to(tl.int64) * stride
        x = tl.load(row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32) * inverse
        maxima = tl.max(x, 1)
        largest = tl.max(maxima, 0)
        mass = tl.sum(tl.sum(tl.where(x > float("-inf"), tl.exp(x - largest), 0.0), 1), 0)
        tl.store(group_max + index * (BLOCKS * per_block) + block * per_block + groups, maxima)
        tl.store(block_max + index * BLOCKS + block, largest)
        tl.store(block_mass + index * BLOCKS + block, mass)
        tl.store(block_finite + index * BLOCKS + block, tl.sum(tl.sum((x > float("-inf")).to(tl.int32), 1), 0))


@jit(do_not_specialize_on_alignment=_SCRATCH)
def _select_kernel(
    group_max, temperatures, top_ks, top_ps, min_ps, selected, floors,
    GREEDY_BELOW: tl.constexpr, VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, LANES: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The groups whose maximum exceeds ``floor``, the smallest maximum that at most GROUPS of them exceed."""
    enter(EARLY)
    index = tl.program_id(0)
    _i, _k, _p, _m, filtered = _is_filtered(temperatures, top_ks, top_ps, min_ps, index, GREEDY_BELOW, VOCAB)
    if filtered:
        lanes = tl.arange(0, LANES)
        maxima = tl.load(group_max + index * NUM_GROUPS + lanes, mask=lanes < NUM_GROUPS, other=float("-inf"))
        floor = float("-inf")
        if tl.sum((maxima > float("-inf")).to(tl.int32), 0) > GROUPS:
            largest = tl.max(maxima, 0)
            lowest = tl.min(tl.where(maxima > float("-inf"), maxima, float("inf")), 0)
            enough = GROUPS + 1.0
            floor = _search(maxima, 1.0, maxima, maxima, largest, lowest, enough, True, True, VOCAB, LANES)
        chosen = maxima > floor
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(selected + index * GROUPS + tl.arange(0, GROUPS), tl.full([GROUPS], -1, dtype=tl.int32))
        tl.debug_barrier()
        tl.store(selected + index * GROUPS + place, lanes, mask=chosen)
        tl.store(floors + index, floor)


@jit(do_not_specialize_on_alignment=_SCRATCH)
def _threshold_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, selected, floors, block_max, block_mass, block_finite, thresholds,
    stride,
    GREEDY_BELOW: tl.constexpr, VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    inverse, top_k, top_p, min_p, filtered = _is_filtered(
        temperatures, top_ks, top_ps, min_ps, index, GREEDY_BELOW, VOCAB
    )
    threshold = float("-inf")
    if filtered:
        blocks = tl.arange(0, BLOCK_LANES)
        inside = blocks < BLOCKS
        maxima = tl.load(block_max + index * BLOCKS + blocks, mask=inside, other=float("-inf"))
        largest = tl.max(maxima, 0)
        if (largest > float("-inf")) & (largest < float("inf")):
            mass = tl.load(block_mass + index * BLOCKS + blocks, mask=inside & (maxima > float("-inf")), other=0.0)
            total = tl.sum(mass * tl.exp(maxima - largest), 0)
            finite = tl.sum(tl.load(block_finite + index * BLOCKS + blocks, mask=inside, other=0), 0)
            top_k = tl.where(top_k < finite, top_k, 0)
            if (top_k > 0) | (top_p < 1.0):
                floor = tl.load(floors + index)
                lanes = tl.arange(0, GROUPS * GROUP)
                group = tl.load(selected + index * GROUPS + lanes // GROUP)
                tokens = group * GROUP + lanes % GROUP
                mask = (group >= 0) & (tokens < VOCAB)
                values = tl.load(row + tokens, mask=mask, other=float("-inf")).to(tl.float32) * inverse
                values = tl.where(values > floor, values, float("-inf"))
                masses = tl.exp(values - largest)
                lowest = tl.min(tl.where(values > float("-inf"), values, float("inf")), 0)
                count, held, _smallest, _below = _probe_held(values, masses, lowest)
                # Where top-k holds, top-p looks at nothing below it; otherwise the nucleus must lie inside.
                reaches = tl.where(top_k > 0, count >= top_k, held >= top_p * total)
                if reaches:
                    threshold = _filters(
                        row, inverse, values, masses, largest, lowest, total, top_k, top_p, True, VOCAB, BLOCK
                    )
                else:
                    _c, _m, bottom, _b = _probe(row, inverse, largest, -3.4028234663852886e38, VOCAB, BLOCK)
                    threshold = _filters(
                        row, inverse, values, masses, largest, bottom, total, top_k, top_p, False, VOCAB, BLOCK
                    )
            if min_p > 0.0:
                threshold = tl.maximum(threshold, largest + tl.log(min_p))
    tl.store(thresholds + index, threshold)


@jit(do_not_specialize_on_alignment=["largest_logits"])
def _draw_kernel(
    logits, temperatures, thresholds, seeds, positions, best_scores, best_tokens, largest_logits, stride,
    GREEDY_BELOW: tl.constexpr, ALL_GREEDY: tl.constexpr, FILTERED: tl.constexpr, VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    block = tl.program_id(0)
    index = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + index.to(tl.int64) * stride + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
    tl.store(largest_logits + index * BLOCKS + block, tl.max(tl.where(x == x, x, float("inf")), 0))
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + index)
        if temperature >= GREEDY_BELOW:
            x = x * (1.0 / temperature)
            if FILTERED:
                x = tl.where(x >= tl.load(thresholds + index), x, float("-inf"))
            words = random_words(tl.load(seeds + index), tl.load(positions + index), tokens)
            x = x - tl.log(exponential(words))
    x = tl.where(x == x, x, float("-inf"))  # NaN never wins
    best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_scores + index * BLOCKS + block, best)
    tl.store(best_tokens + index * BLOCKS + block, block * BLOCK + place.to(tl.int32))


@jit(do_not_specialize_on_alignment=["largest_logits"])
def _pick_kernel(
    best_scores, best_tokens, largest_logits, out, not_finite,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    index = tl.program_id(0)
    blocks = tl.arange(0, LANES)
    inside = blocks < BLOCKS
    scores = tl.load(best_scores + index * BLOCKS + blocks, mask=inside, other=float("-inf"))
    tokens = tl.load(best_tokens + index * BLOCKS + blocks, mask=inside, other=2147483647)
    largest = tl.max(tl.load(largest_logits + index * BLOCKS + blocks, mask=inside, other=float("-inf")), 0)
    tl.store(not_finite + index, (tl.abs(largest) == float("inf")).to(tl.uint8))
    wins = scores == tl.max(scores, 0)
    tl.store(out + index, tl.min(tl.where(wins, tokens, 2147483647), 0).to(tl.int64))


def _thresholds(logits: Tensor, parameters: tuple[Tensor, Tensor, Tensor, Tensor], thresholds: Tensor) -> None:
    """The smallest scaled logit that every row keeps; -inf where it keeps all."""
    num_rows, vocab_size = logits.shape
    block = min(_DRAW_BLOCK, max(_GROUP, next_power_of_2(vocab_size)))
    blocks = cdiv(vocab_size, block)
    num_groups = blocks * (block // _GROUP)
    floats = torch.empty(num_rows, num_groups + 2 * blocks + 1, dtype=torch.float32, device=logits.device)
    integers = torch.empty(num_rows, _GROUPS + blocks, dtype=torch.int32, device=logits.device)
    sizes = [num_rows * n for n in (num_groups, blocks, blocks, 1)]
    group_max, block_max, block_mass, floors = floats.view(-1).split(sizes)
    selected, block_finite = integers.view(-1).split([num_rows * _GROUPS, num_rows * blocks])
    _groups_kernel[(blocks, num_rows)](
        logits, *parameters, group_max, block_max, block_mass, block_finite, logits.stride(0),
        GREEDY_BELOW=GREEDY_BELOW, VOCAB=vocab_size, GROUP=_GROUP, BLOCKS=blocks, BLOCK=block, num_warps=4,
        **early_launch(logits.device),
    )  # fmt: skip
    _select_kernel[(num_rows,)](
        group_max, *parameters, selected, floors,
        GREEDY_BELOW=GREEDY_BELOW, VOCAB=vocab_size, NUM_GROUPS=num_groups,
        LANES=max(_GROUPS, next_power_of_2(num_groups)), GROUPS=_GROUPS, num_warps=8,
        **early_launch(logits.device),
    )  # fmt: skip
    _threshold_kernel[(num_rows,)](
        logits, *parameters, selected, floors, block_max, block_mass, block_finite, thresholds, logits.stride(0),
        GREEDY_BELOW=GREEDY_BELOW, VOCAB=vocab_size, GROUP=_GROUP, GROUPS=_GROUPS, BLOCKS=blocks,
        BLOCK_LANES=next_power_of_2(blocks), BLOCK=1024 if vocab_size <= 1024 else 8192, num_warps=16,
        **early_launch(logits.device),
    )  # fmt: skip


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    all_greedy: bool,
    candidates: int,
    uses_min_p: bool,
) -> tuple[Tensor, Tensor]:
    """``sample`` of ``weft/ops/sampling.py``; logits may have any float dtype.

    Rows without a filter skip the search on the device: a captured graph passes ``candidates`` other than 0 once and
    serves any mixture of rows.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    filtered = not all_greedy and (candidates > 0 or uses_min_p)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if filtered:
        _thresholds(logits, (temperature, top_k, top_p, min_p), thresholds)
    block = min(_DRAW_BLOCK, next_power_of_2(vocab_size))
    blocks = cdiv(vocab_size, block)
    scores, largest = torch.empty((2, num_rows, blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, blocks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    not_finite = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    _draw_kernel[(blocks, num_rows)](
        logits, temperature, thresholds, seeds, positions, scores, tokens, largest, logits.stride(0),
        GREEDY_BELOW=GREEDY_BELOW, ALL_GREEDY=all_greedy, FILTERED=filtered, VOCAB=vocab_size, BLOCKS=blocks,
        BLOCK=block, num_warps=4, **early_launch(logits.device),
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        scores, tokens, largest, out, not_finite, BLOCKS=blocks, LANES=next_power_of_2(blocks), num_warps=1,
        **early_launch(logits.device),
    )  # fmt: skip
    return out, not_finite.view(torch.bool)
