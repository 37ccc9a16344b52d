"""Choosing the next token from logits, with random numbers that depend on nothing else in the batch.

Job: penalties, the top-k / top-p / min-p filters, the counter-based random numbers, and sampling. Owns: the random
number generator's definition, which a kernel on another device must reproduce bit for bit. Does not know: requests,
stop conditions, log probabilities.

The order of a row's steps: penalties, division by the temperature, top-k, top-p, min-p, sampling.

Random numbers. A uniform number is a pure function of (seed, output position, token id). With ``mix`` the 32-bit
finaliser "lowbias32" (C. Wellons, "Prospecting for Hash Functions"; xor-shifts 16, 15, 16 and the multipliers below)
and all arithmetic modulo 2**32::

    key_i = mix(mix(mix(c_i ^ seed_low) ^ seed_high) ^ position)            i = 1, 2: a 64-bit key per (seed, position)
    h     = mix((mix(token) ^ key_1) * (key_2 | 1))
    u     = min((float32(h) + 0.5) * 2**-32, 1 - 2**-24)                    float32; exact near 0, never 0 or 1
    E     = -log1p(-u)                                                      exponential with mean 1

For one key, ``token -> h`` is a bijection, so no two tokens of a row share a number. The sample is the token with the
smallest ``E / p``. The minimum of exponentials with rates p falls on token i with probability ``p_i / sum(p)``, so p
need not be normalised (the Gumbel-max trick in exponential form).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import by_row
from weft.sampling_params import GREEDY_BELOW

_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B
_KEY_1, _KEY_2 = 0x243F6A88, 0x85A308D3  # the first digits of pi's fraction
_MASK_32 = 0xFFFFFFFF
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - 2**32 if word >= 2**31 else word


def _mix_(x: Tensor) -> Tensor:
    """lowbias32 on int32 words, in place. A right shift of int32 copies the sign, so the copies are masked off."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(_MIX_1)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(_MIX_2)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two 32-bit keys of every row: ``[N, 1]`` int32 each, the second one odd."""
    words = torch.stack([seeds, seeds >> 32, positions]).to(torch.int32)  # keeps the low 32 bits
    low, high, position = words.unsqueeze(2)
    start = torch.cat([low ^ _signed(_KEY_1), low ^ _signed(_KEY_2)], dim=1)
    first, second = _mix_(_mix_(_mix_(start) ^ high) ^ position).split(1, dim=1)
    return first, second | 1


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """The 32-bit hash ``h`` of the module docstring.

    Args:
        seeds: ``[N]`` int64: the bits of an unsigned 64-bit seed.
        positions: ``[N]`` integers: tokens generated so far.

    Returns:
        ``[N, vocab_size]`` int32: the bits of an unsigned 32-bit number.
    """
    first, second = _keys(seeds, positions.long())
    tokens = _mix_(torch.arange(vocab_size, dtype=torch.int32, device=seeds.device))
    return _mix_((tokens ^ first).mul_(second))


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exponential random numbers with mean 1: ``[N, vocab_size]`` float32, each in (0, 16.7).

    Args: as for ``random_words``.
    """
    words = random_words(seeds, positions, vocab_size).to(torch.int64).bitwise_and_(_MASK_32)
    uniform = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def apply_penalties_(
    logits: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
) -> Tensor:
    """Repetition penalty (CTRL, arXiv 1909.05858), then frequency and presence penalties (OpenAI), in place.

    Args:
        logits: ``[N, V]`` float32.
        presence, frequency: ``[N]``, over generated tokens; 0 is off.
        repetition: ``[N]``, over prompt and generated tokens: positive logits are divided by it, negative ones
            multiplied; 1 is off.
        output_counts: ``[N, V]`` integers: how often each token was generated.
        prompt_mask: ``[N, V]`` bool: whether the token occurs in the prompt.
    """
    generated = output_counts > 0
    factor = torch.where(generated | prompt_mask, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(frequency[:, None] * output_counts)
    return logits.sub_(presence[:, None] * generated)


def filter_candidates(top_k: Sequence[int], top_p: Sequence[float], vocab_size: int) -> int:
    """Return how many of the likeliest tokens the filters of a batch have to read (host side).

    Returns:
        0 if no row has a top-k or top-p; ``vocab_size`` if a row has a top-p without a top-k (everything must be
        sorted); otherwise the largest top-k.
    """
    candidates = 0
    for k, p in zip(top_k, top_p, strict=True):
        if 0 < k < vocab_size:
            candidates = max(candidates, k)
        elif p < 1.0:
            return vocab_size
    return candidates


def apply_top_k_top_p_min_p_(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None,
    *,
    candidates: int,
) -> Tensor:
    """Set the logits of filtered tokens to -inf, in place.

    Every filter keeps the tokens above some value, so each row has one threshold. Tokens equal to the threshold stay. A
    row's result therefore depends on no other row, nor on the order in which equal logits are sorted.

    Args:
        logits: ``[N, V]`` float32, already divided by the temperature.
        top_k: ``[N]`` integers: keep the k likeliest; 0 or less keeps all.
        top_p: ``[N]``: of those, keep the smallest set of likeliest tokens whose share reaches it; 1 keeps all.
        min_p: ``[N]`` or None: of those, drop tokens less likely than this share of the likeliest; 0 keeps all.
        candidates: from ``filter_candidates``.
    """
    threshold = None
    if candidates:
        threshold = _top_k_top_p_threshold(logits, top_k, top_p, candidates)
    if min_p is not None:
        lowest = logits.amax(-1, keepdim=True) + min_p.log()[:, None]
        threshold = lowest if threshold is None else torch.maximum(threshold, lowest)
    return logits if threshold is None else logits.masked_fill_(logits < threshold, -torch.inf)


def _top_k_top_p_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, candidates: int) -> Tensor:
    """The smallest logit that each row keeps: ``[N, 1]``."""
    likeliest = logits.topk(min(candidates, logits.shape[1]), dim=-1).values  # sorted, largest first
    rank = torch.arange(likeliest.shape[1], device=logits.device)
    has_k = ((top_k > 0) & (top_k < logits.shape[1]))[:, None]  # a larger k keeps all, as 0 does
    within_k = (rank < top_k[:, None]) | ~has_k
    mass = (likeliest - likeliest[:, :1]).exp_().masked_fill_(~within_k, 0.0).cumsum_(-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    share = top_p[:, None]
    keep = within_k & ((before < share * mass[:, -1:]) | (share >= 1.0))
    last = keep.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    filtered = has_k | (share < 1.0)
    return torch.where(filtered, likeliest.gather(1, last), -torch.inf)


class SamplingFlags(NamedTuple):
    """The host's knowledge of the rows to sample.

    Attributes:
        all_greedy: every temperature is 0; the random numbers are then skipped.
        candidates: from ``filter_candidates``.
        uses_min_p: some row has a min-p above 0.
    """

    all_greedy: bool
    candidates: int
    uses_min_p: bool


@with_kernel(
    "weft.ops.sampling.kernels", by_row("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions")
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    flags: SamplingFlags,
    *,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Each row's token depends on that row's arguments alone.

    Args:
        logits: ``[N, V]``, any float dtype, penalties and masks applied; not modified. -inf is never sampled.
        temperature, top_p, min_p: ``[N]`` float32. Temperature 0 takes the largest logit (the lowest id of equals).
        top_k: ``[N]`` integers, 0 for all.
        seeds: ``[N]`` int64, the bits of an unsigned 64-bit seed.
        positions: ``[N]`` integers, tokens generated so far.

    Returns:
        The tokens, ``[N]`` int64, and ``[N]`` bool: whose largest logit is NaN or infinite, so that the token is a
        meaningless id below V.
    """
    greedy, nan_rows = logits.argmax(-1), ~logits.amax(-1).isfinite()
    if flags.all_greedy:
        return greedy, nan_rows
    is_greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    apply_top_k_top_p_min_p_(scaled, top_k, top_p, min_p if flags.uses_min_p else None, candidates=flags.candidates)
    rates = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
    sampled = exponential_noise(seeds, positions, logits.shape[1]).div_(rates).argmin(-1)
    return torch.where(is_greedy, greedy, sampled), nan_rows
