"""Sampling kernels: a draw in one pass over the logits, and a search for the filters' threshold without sorting.

Job: ``sample`` of ``weft/ops/sampling.py`` on the GPU, with the random numbers defined there, bit for bit. Owns: the
search. Does not know: penalties, masks, requests.

    threshold  one program per row: the smallest scaled logit that top-k, top-p and min-p keep. All three keep what lies
               above some value, so a bisection between two values of the row finds it; every step reads the row once
               and ends at values that occur, so it stops when none lies between. Only if some row has a filter.
    draw       programs per block of tokens: the best score of the block. Greedy: the logit. Otherwise
               ``logit / temperature - log(E)``, the logarithm of ``p / E`` up to a constant of the row (Gumbel-max).
    pick       one program per row: the best block, the lower id among equals.

Sums run in a fixed order inside a row, so a row's token depends on nothing else in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.sampling import GREEDY_BELOW

_DRAW_BLOCK = 4096


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
    """``-log1p(-u)`` of the uniform number ``u`` of a word, exact near 0 where the draw is decided."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # Up to one half -log(1 - u) = 2 atanh(z) by its series (z <= 1/3, 9 terms: below 1e-9); beyond, log has no trouble.
    z = u / (2.0 - u)
    w = z * z
    series = 1.0 / 17.0
    series = series * w + 1.0 / 15.0
    series = series * w + 1.0 / 13.0
    series = series * w + 1.0 / 11.0
    series = series * w + 1.0 / 9.0
    series = series * w + 1.0 / 7.0
    series = series * w + 1.0 / 5.0
    series = series * w + 1.0 / 3.0
    series = series * w + 1.0
    return tl.where(u <= 0.5, 2.0 * z * series, -tl.log(1.0 - u))


@triton.jit
def _probe(row, temperature, largest, value, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """About the scaled logits at or above ``value``: how many, their mass, the smallest; and the largest one below."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        tokens = start + lanes
        x = tl.load(row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
        x = tl.div_rn(x, temperature + tl.zeros([BLOCK], dtype=tl.float32))
        above = x >= value
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(x - largest), 0.0)
        smallest = tl.where(above, tl.minimum(smallest, x), smallest)
        below = tl.where(above, below, tl.maximum(below, x))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(smallest, 0), tl.max(below, 0)


@triton.jit
def _search(
    row, temperature, largest, lowest, enough, BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest value v of the row with ``count(x >= v)`` (or ``mass(x >= v)``) at least ``enough``.

    ``lowest`` is a value of the row for which that holds.
    """
    low = lowest  # the answer is a value of the row in [low, high]
    high = largest
    middle = largest
    while low < high:
        count, mass, smallest, below = _probe(row, temperature, largest, middle, VOCAB, BLOCK)
        if BY_COUNT:
            holds = count.to(tl.float32) >= enough
        else:
            holds = mass >= enough
        low = tl.where(holds, smallest, low)
        high = tl.where(holds, high, below)
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
    return low


@triton.jit
def _threshold_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, thresholds, stride,
    GREEDY_BELOW: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index).to(tl.int32)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    threshold = float("-inf")
    has_k = (top_k > 0) & (top_k < VOCAB)
    if (temperature >= GREEDY_BELOW) & (has_k | (top_p < 1.0) | (min_p > 0.0)):
        lanes = tl.arange(0, BLOCK)
        highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        finite = tl.zeros([BLOCK], dtype=tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            tokens = start + lanes
            x = tl.load(row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
            x = tl.div_rn(x, temperature + tl.zeros([BLOCK], dtype=tl.float32))
            drawable = x > float("-inf")
            highest = tl.maximum(highest, x)
            lowest = tl.where(drawable, tl.minimum(lowest, x), lowest)
            finite += drawable.to(tl.int32)
        largest = tl.max(highest, 0)
        bottom = tl.min(lowest, 0)
        if largest < float("inf"):
            has_k = has_k & (top_k < tl.sum(finite, 0))
            if has_k:
                threshold = _search(row, temperature, largest, bottom, top_k.to(tl.float32), True, VOCAB, BLOCK)
            if top_p < 1.0:
                lower = tl.maximum(threshold, bottom)
                count, mass, _smallest, _below = _probe(row, temperature, largest, lower, VOCAB, BLOCK)
                if has_k:  # of the tokens that equal the k-th, only as many count as there is room for
                    mass -= (count - top_k).to(tl.float32) * tl.exp(lower - largest)
                nucleus = _search(row, temperature, largest, lower, top_p * mass, False, VOCAB, BLOCK)
                threshold = tl.maximum(threshold, nucleus)
            if min_p > 0.0:
                threshold = tl.maximum(threshold, largest + tl.log(min_p))
    tl.store(thresholds + index, threshold)


@triton.jit
def _draw_kernel(
    logits, temperatures, thresholds, seeds, positions, best_scores, best_tokens, stride,
    GREEDY_BELOW: tl.constexpr, ALL_GREEDY: tl.constexpr, FILTERED: tl.constexpr, VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    index = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + index.to(tl.int64) * stride + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + index)
        if temperature >= GREEDY_BELOW:
            x = tl.div_rn(x, temperature + tl.zeros([BLOCK], dtype=tl.float32))
            if FILTERED:
                x = tl.where(x >= tl.load(thresholds + index), x, float("-inf"))
            words = random_words(tl.load(seeds + index), tl.load(positions + index), tokens)
            x = x - tl.log(exponential(words))
    x = tl.where(x == x, x, float("-inf"))  # NaN never wins
    best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_scores + index * BLOCKS + block, best)
    tl.store(best_tokens + index * BLOCKS + block, block * BLOCK + place.to(tl.int32))


@triton.jit
def _pick_kernel(best_scores, best_tokens, out, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    index = tl.program_id(0)
    blocks = tl.arange(0, LANES)
    inside = blocks < BLOCKS
    scores = tl.load(best_scores + index * BLOCKS + blocks, mask=inside, other=float("-inf"))
    tokens = tl.load(best_tokens + index * BLOCKS + blocks, mask=inside, other=2147483647)
    wins = scores == tl.max(scores, 0)
    tl.store(out + index, tl.min(tl.where(wins, tokens, 2147483647), 0).to(tl.int64))


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
) -> Tensor:
    """``sample`` of ``weft/ops/sampling.py``; logits may have any float dtype.

    Rows without a filter skip the search on the device: a captured graph passes ``candidates`` other than 0 once and
    serves any mixture of rows.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    filtered = not all_greedy and (candidates > 0 or uses_min_p)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if filtered:
        small = vocab_size <= 1024
        _threshold_kernel[(num_rows,)](
            logits, temperature, top_k, top_p, min_p, thresholds, logits.stride(0), GREEDY_BELOW=GREEDY_BELOW,
            VOCAB=vocab_size, BLOCK=1024 if small else 8192, num_warps=4 if small else 16,
        )  # fmt: skip
    block = min(_DRAW_BLOCK, triton.next_power_of_2(vocab_size))
    blocks = triton.cdiv(vocab_size, block)
    scores = torch.empty((num_rows, blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, blocks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _draw_kernel[(blocks, num_rows)](
        logits, temperature, thresholds, seeds, positions, scores, tokens, logits.stride(0),
        GREEDY_BELOW=GREEDY_BELOW, ALL_GREEDY=all_greedy, FILTERED=filtered, VOCAB=vocab_size, BLOCKS=blocks,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](scores, tokens, out, BLOCKS=blocks, LANES=triton.next_power_of_2(blocks), num_warps=1)
    return out
