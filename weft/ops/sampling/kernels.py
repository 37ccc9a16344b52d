"""Sampling kernels: one pass over the logits, and a search for the filters' threshold without sorting.

Job: ``sample`` of ``weft/ops/sampling`` on the GPU, with the random numbers defined there, bit for bit. Owns: the
search. Does not know: penalties, masks, requests.

All three filters keep what lies above some value of the row, its threshold. A batch takes two launches, whether or not
rows have filters, which only the device knows in a captured graph:

    scan       programs per block of tokens. Of a row without a filter: the block's best token, by its logit (greedy) or
               by ``(logit - largest) / temperature - log(E)``, the logarithm of ``p / E`` up to a constant of the block
               (Gumbel-max). Of a row with one: the largest logit of every group of 32 tokens, and the block's mass.
    choose     one program per row. Without a filter: the best block, the lower id among equals. With one:
               select     the (up to) 256 groups with the largest maxima: what they hold above the next maximum are the
                          likeliest tokens of the row, without exception;
               threshold  by bisection over those, in registers. If they do not reach far enough (a flat distribution, a
                          large k), it reads the whole row in every step. Each step ends at values that occur, so it
                          stops when none lies between;
               draw       the best score among what the threshold keeps, from registers or from the whole row.

Scores are relative to a largest logit, because next to ``logit / temperature`` float32 has no room for ``log(E)`` where
temperatures are low.

Sums run in a fixed order inside a row, so a row's token depends on nothing else in the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.sampling import sample
from weft.ops.sampling.random_numbers import exponential, random_words, uniform
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import LOG2_E
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.sampling_params import GREEDY_BELOW

_DRAW_BLOCK = 2048
_GROUP, _GROUPS = tl.constexpr(32), tl.constexpr(256)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)

_SCAN_REGISTERS = 64
"""Registers of a thread. More would help only where all scores are computed, which is rare, and fewer programs would
fit."""

_NO_TOKEN = tl.constexpr(2147483647)
_SCRATCH = [
    "group_max", "block_max", "block_mass", "block_finite", "selected", "best_scores", "best_tokens", "largest_logits",
    "thresholds",
]  # fmt: skip
"""Parts of one buffer, aligned as the number of rows has it: no reason to compile again."""


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
        # Several tokens may equal the k-th. Subtract the probability of those beyond k.
        total -= (count - top_k).to(tl.float32) * tl.exp(threshold - largest)
    if top_p < 1.0:
        enough = top_p * total
        threshold = _search(row, inverse, values, masses, largest, threshold, enough, False, HELD, VOCAB, BLOCK)
    return threshold


@triton.jit
def _is_filtered(temperatures, top_ks, top_ps, min_ps, index, VOCAB: tl.constexpr):
    """``(1 / temperature, top_k or 0, top_p, min_p, whether any filter is on)`` of a row."""
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    top_k = tl.where((top_k > 0) & (top_k < VOCAB), top_k, 0).to(tl.int32)
    filtered = (temperature >= _GREEDY_BELOW) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return 1.0 / temperature, top_k, top_p, min_p, filtered


@triton.jit
def _best_of(x, seed, position, tokens):
    """``(score, token)`` of the best of some scaled logits: the lowest token of the highest score. NaN never wins."""
    scores = x - tl.log(exponential(random_words(seed, position, tokens)))
    scores = tl.where(scores == scores, scores, float("-inf"))
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, tokens, _NO_TOKEN), 0)


@triton.jit
def _best_of_block(row, raw, largest, inverse, seed, position, tokens, VOCAB: tl.constexpr):
    """``_best_of`` of ``(raw - largest) * inverse``, where ``raw`` are the logits of ``row`` at ``tokens`` and
    ``largest`` is the largest of them: the same bits for less arithmetic.

    ``E`` is at least the first terms of its series, so the best token is one with a small ``terms / p``, which takes no
    logarithm. Only where other tokens come near to the true ``E / p`` of the smallest are all scores computed."""
    u = uniform(random_words(seed, position, tokens))
    scale = inverse * LOG2_E
    bound = u * (1.0 + u * (0.5 + u * 0.3333)) * tl.exp2((largest - raw) * scale)
    bound = tl.where(bound == bound, bound, float("inf"))
    token = tl.min(tl.where(bound == tl.min(bound, 0), tokens, _NO_TOKEN), 0)
    logit = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    noise = exponential(random_words(seed, position, token))
    best = (logit - largest) * inverse - tl.log(noise)
    near = noise * tl.exp2((largest - logit) * scale) * (1.001 + 1e-6 * tl.abs(best))  # more than is lost to rounding
    if tl.sum((bound <= near).to(tl.int32), 0) != 1:
        best, token = _best_of((raw - largest) * inverse, seed, position, tokens)
    return best, token


@jit(do_not_specialize_on_alignment=_SCRATCH)
def _scan_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, group_max, block_max, block_mass, block_finite,
    best_scores, best_tokens, largest_logits, stride,
    ALL_GREEDY: tl.constexpr, FILTERED: tl.constexpr, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Process one block of one row: find its best token, with a score relative to its largest logit, or the starting
    values of the search for the row's threshold."""
    enter(EARLY)
    block = tl.program_id(0)
    index = tl.program_id(1)
    place = index * BLOCKS + block
    filtered = False
    if FILTERED:
        inverse, _k, _p, _m, filtered = _is_filtered(temperatures, top_ks, top_ps, min_ps, index, VOCAB)
    row = logits + index.to(tl.int64) * stride
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
    largest_logit = tl.max(tl.where(raw == raw, raw, float("inf")), 0)
    tl.store(largest_logits + place, largest_logit)
    if FILTERED:  # noqa: SIM102 (known to the compiler)
        if filtered:
            per_block: tl.constexpr = BLOCK // _GROUP
            x = tl.reshape(raw, [per_block, _GROUP]) * inverse
            maxima = tl.max(x, 1)
            largest = tl.max(maxima, 0)
            mass = tl.sum(tl.sum(tl.where(x > float("-inf"), tl.exp(x - largest), 0.0), 1), 0)
            tl.store(group_max + place * per_block + tl.arange(0, per_block), maxima)
            tl.store(block_max + place, largest)
            tl.store(block_mass + place, mass)
            tl.store(block_finite + place, tl.sum(tl.sum((x > float("-inf")).to(tl.int32), 1), 0))
    if not filtered:
        is_greedy = True
        inverse = 1.0
        if not ALL_GREEDY:
            temperature = tl.load(temperatures + index)
            is_greedy = temperature < _GREEDY_BELOW
            inverse = 1.0 / temperature
        if is_greedy:
            x = tl.where(raw == raw, raw, float("-inf"))
            _best, token = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
            best = 0.0
            token += block * BLOCK
        else:
            seed = tl.load(seeds + index)
            position = tl.load(positions + index)
            best, token = _best_of_block(row, raw, largest_logit, inverse, seed, position, tokens, VOCAB)
        tl.store(best_scores + place, best)
        tl.store(best_tokens + place, token.to(tl.int32))


@triton.jit
def _select(group_max, selected, NUM_GROUPS: tl.constexpr, LANES: tl.constexpr, VOCAB: tl.constexpr):
    """Store the groups whose maximum exceeds the smallest maximum that at most 256 of them exceed. Returns that."""
    lanes = tl.arange(0, LANES)
    maxima = tl.load(group_max + lanes, mask=lanes < NUM_GROUPS, other=float("-inf"))
    floor = float("-inf")
    if tl.sum((maxima > float("-inf")).to(tl.int32), 0) > _GROUPS:
        largest = tl.max(maxima, 0)
        lowest = tl.min(tl.where(maxima > float("-inf"), maxima, float("inf")), 0)
        enough = _GROUPS + 1.0
        floor = _search(maxima, 1.0, maxima, maxima, largest, lowest, enough, True, True, VOCAB, LANES)
    chosen = maxima > floor
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(selected + tl.arange(0, _GROUPS), tl.full([_GROUPS], -1, dtype=tl.int32))
    tl.debug_barrier()
    tl.store(selected + place, lanes, mask=chosen)
    tl.debug_barrier()
    return floor


@triton.jit
def _threshold(
    row, inverse, values, masses, largest, floor, total, finite, top_k, top_p, min_p,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest scaled logit that a row keeps. ``values``: all of its logits above ``floor``, else -inf."""
    threshold = float("-inf")
    if (largest > float("-inf")) & (largest < float("inf")):
        top_k = tl.where(top_k < finite, top_k, 0)
        if (top_k > 0) | (top_p < 1.0):
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
    return threshold


@triton.jit
def _draw_row(row, inverse, largest, threshold, seed, position, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The best token of a whole row among those that the threshold keeps; ``largest``: of its scaled logits."""
    best = float("-inf")
    token = 0
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32) * inverse
        score, candidate = _best_of(tl.where(x >= threshold, x - largest, float("-inf")), seed, position, tokens)
        token = tl.where(score > best, candidate, token)
        best = tl.maximum(best, score)
    return token


@jit(do_not_specialize_on_alignment=_SCRATCH)
def _choose_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, group_max, block_max, block_mass, block_finite,
    selected, best_scores, best_tokens, largest_logits, thresholds, out, not_finite, stride,
    FILTERED: tl.constexpr, VOCAB: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row: its token, and whether its largest logit is finite."""
    enter(EARLY)
    index = tl.program_id(0)
    blocks = tl.arange(0, BLOCK_LANES)
    inside = blocks < BLOCKS
    first = index * BLOCKS
    block_largest = tl.load(largest_logits + first + blocks, mask=inside, other=float("-inf"))
    largest_logit = tl.max(block_largest, 0)
    tl.store(not_finite + index, (tl.abs(largest_logit) == float("inf")).to(tl.uint8))
    filtered = False
    if FILTERED:
        inverse, top_k, top_p, min_p, filtered = _is_filtered(temperatures, top_ks, top_ps, min_ps, index, VOCAB)
        if filtered:
            row = logits + index.to(tl.int64) * stride
            floor = _select(group_max + index * NUM_GROUPS, selected + index * _GROUPS, NUM_GROUPS, GROUP_LANES, VOCAB)
            maxima = tl.load(block_max + first + blocks, mask=inside, other=float("-inf"))
            largest = tl.max(maxima, 0)
            mass = tl.load(block_mass + first + blocks, mask=inside & (maxima > float("-inf")), other=0.0)
            total = tl.sum(mass * tl.exp(maxima - largest), 0)
            finite = tl.sum(tl.load(block_finite + first + blocks, mask=inside, other=0), 0)
            lanes = tl.arange(0, _GROUPS * _GROUP)
            group = tl.load(selected + index * _GROUPS + lanes // _GROUP)
            tokens = group * _GROUP + lanes % _GROUP
            held = (group >= 0) & (tokens < VOCAB)
            values = tl.load(row + tokens, mask=held, other=float("-inf")).to(tl.float32) * inverse
            values = tl.where(values > floor, values, float("-inf"))
            threshold = _threshold(
                row, inverse, values, tl.exp(values - largest), largest, floor, total, finite, top_k, top_p, min_p,
                VOCAB, BLOCK,
            )  # fmt: skip
            tl.store(thresholds + index, threshold)
            seed = tl.load(seeds + index)
            position = tl.load(positions + index)
            if threshold > floor:
                x = tl.where(values >= threshold, values - largest, float("-inf"))
                _score, token = _best_of(x, seed, position, tokens)
            else:
                token = _draw_row(row, inverse, largest, threshold, seed, position, VOCAB, BLOCK)
            tl.store(out + index, token.to(tl.int64))
    if not filtered:
        temperature = tl.load(temperatures + index)
        inverse = tl.where(temperature < _GREEDY_BELOW, 1.0, 1.0 / temperature)
        scores = tl.load(best_scores + first + blocks, mask=inside, other=float("-inf"))
        scores += (block_largest - largest_logit) * inverse
        scores = tl.where(scores == scores, scores, float("-inf"))
        tokens = tl.load(best_tokens + first + blocks, mask=inside, other=_NO_TOKEN)
        wins = scores == tl.max(scores, 0)
        tl.store(out + index, tl.min(tl.where(wins, tokens, _NO_TOKEN), 0).to(tl.int64))


@launches(sample, invariant={})
def sample_triton(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    flags,
    *,
    thresholds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``sample`` of ``weft/ops/sampling``; logits may have any float dtype.

    Rows without a filter skip the search on the device: a captured graph passes ``candidates`` other than 0 once and
    serves any mixture of rows. ``thresholds``: ``[N]`` float32, receives the smallest scaled logit that each row with a
    filter keeps.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    filtered = not flags.all_greedy and (flags.candidates > 0 or flags.uses_min_p)
    block = min(_DRAW_BLOCK, max(_GROUP.value, next_power_of_2(vocab_size)))
    blocks = cdiv(vocab_size, block)
    num_groups = blocks * (block // _GROUP.value)
    sizes = [num_rows * n for n in (num_groups * filtered, blocks, blocks, blocks, blocks, 1)]
    floats = torch.empty(sum(sizes), dtype=torch.float32, device=logits.device).split(sizes)
    group_max, block_max, block_mass, scores, largest, kept = floats
    sizes = [num_rows * n for n in (_GROUPS.value * filtered, blocks, blocks)]
    selected, finite, tokens = torch.empty(sum(sizes), dtype=torch.int32, device=logits.device).split(sizes)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    not_finite = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    parameters = (temperature, top_k, top_p, min_p, seeds, positions)
    _scan_kernel[(blocks, num_rows)](
        logits, *parameters, group_max, block_max, block_mass, finite, scores, tokens, largest, logits.stride(0),
        ALL_GREEDY=flags.all_greedy, FILTERED=filtered, VOCAB=vocab_size, BLOCKS=blocks, BLOCK=block,
        num_warps=4, maxnreg=_SCAN_REGISTERS, **early_launch(logits.device),
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        logits, *parameters, group_max, block_max, block_mass, finite, selected, scores, tokens, largest,
        kept if thresholds is None else thresholds, out, not_finite, logits.stride(0),
        FILTERED=filtered, VOCAB=vocab_size, NUM_GROUPS=num_groups,
        GROUP_LANES=max(_GROUPS.value, next_power_of_2(num_groups)), BLOCKS=blocks,
        BLOCK_LANES=next_power_of_2(blocks), BLOCK=1024 if vocab_size <= 1024 else 8192,
        num_warps=16 if filtered else 1, **early_launch(logits.device),
    )  # fmt: skip
    return out, not_finite.view(torch.bool)
