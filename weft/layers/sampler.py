"""From logits to tokens: masks, bias, penalties, sampling, and log probabilities.

Job: apply what the rows of a batch ask for, and nothing that no row asks for. Owns: the order of the steps (allowed
ids, blocked ids, logit bias, penalties, then ``ops/sampling``) and the form of log probabilities. Does not know:
requests, rows' histories, or stop conditions; the runner hands in tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.sampling import SamplingFlags, apply_penalties_, apply_top_k_top_p_min_p_, sample
from weft.sampling_params import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of all rows; a row without them has 0, 0 and 1.

    Attributes:
        presence, frequency, repetition: ``[N]`` float32.
        output_counts: ``[N, V]`` int32, how often each token was generated.
        prompt_mask: ``[N, V]`` bool, whether it stands in the prompt.
    """

    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    output_counts: Tensor
    prompt_mask: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Sparse additions: ``values[i]`` to the logit of ``tokens[i]`` in ``rows[i]``, pairs unique. ``[M]`` each."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class BlockedTokens:
    """Pairs that may not be sampled (stop ids before ``min_tokens``, last tokens of bad words). ``[M]`` int64 each.

    ``active [M]`` bool: which pairs count; only the device knows whether a bad word's beginning stands there.
    """

    rows: Tensor
    tokens: Tensor
    active: Tensor


LogitsProcessor = Callable[[Tensor], Tensor]
"""A function from a row's logits ``[V]`` float32, which it may modify, to the logits to sample from ``[V]``."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling parameters of one step's rows. Optional parts are present only if some row needs them.

    Attributes:
        temperature, top_p, min_p: ``[N]`` float32.
        top_k: ``[N]`` int64, 0 for all.
        seeds: ``[N]`` int64, the bits of an unsigned 64-bit seed.
        positions: ``[N]`` int64, tokens generated so far.
        all_greedy: every temperature is 0.
        candidates: from ``ops.sampling.filter_candidates``.
        penalties, bias, blocked: see their classes.
        allowed: ``[N, V]`` bool, False where a token may not be sampled.
        processors: by index of the row; they see the model's logits, before every other edit.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    all_greedy: bool
    candidates: int = 0
    uses_min_p: bool = False
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    allowed: Tensor | None = None
    blocked: BlockedTokens | None = None
    processors: Mapping[int, LogitsProcessor] | None = None

    @property
    def edits_logits(self) -> bool:
        """True if any row's logits change before sampling."""
        parts = (self.processors, self.penalties, self.bias, self.allowed, self.blocked)
        return any(part is not None for part in parts)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at N positions.

    Attributes:
        token_ids: ``[N, 1 + top_n]`` int64: the token that stands there, then the likeliest ones in order.
        logprobs: ``[N, 1 + top_n]`` float32.
        ranks: ``[N]`` int64, rank of the token that stands there; 1 is the likeliest.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Results of one step.

    Attributes:
        token_ids: ``[N]`` int64.
        nan_rows: ``[N]`` bool: the row's logits hold NaN or infinity, or nothing may be sampled; its token is
            meaningless.
    """

    token_ids: Tensor
    nan_rows: Tensor


def logprobs_of(logits: Tensor, token_ids: Tensor, top_n: int) -> Logprobs:
    """Log probabilities of given tokens, and of the ``top_n`` likeliest, under ``softmax(logits)``.

    Args:
        logits: ``[N, V]``, any float dtype; computed in float32.
        token_ids: ``[N]`` int64.
        top_n: at least 0, at most V.
    """
    scores = logits.float().log_softmax(-1)
    chosen_ids = token_ids[:, None]
    chosen = scores.gather(1, chosen_ids)
    ranks = (scores > chosen).sum(-1).add_(1)
    if top_n == 0:
        return Logprobs(chosen_ids, chosen, ranks)
    values, ids = scores.topk(top_n, dim=-1)
    return Logprobs(torch.cat([chosen_ids, ids], dim=1), torch.cat([chosen, values], dim=1), ranks)


def processed_logits(logits: Tensor, batch: SamplingMetadata, token_ids: Tensor) -> Tensor:
    """The logits ``[N, V]`` float32 whose softmax ``token_ids [N]`` were sampled from.

    Greedy rows are neither divided by a temperature nor filtered. A sampled token is never filtered, however a kernel
    has rounded the sums of top-p.
    """
    scores = _edit(logits.to(torch.float32, copy=True), batch)
    is_greedy = batch.temperature < GREEDY_BELOW
    scores /= torch.where(is_greedy, 1.0, batch.temperature)[:, None]
    chosen = scores.gather(1, token_ids[:, None])
    if batch.candidates or batch.uses_min_p:
        top_k, top_p = batch.top_k.masked_fill(is_greedy, 0), batch.top_p.masked_fill(is_greedy, 1.0)
        min_p = batch.min_p.masked_fill(is_greedy, 0.0) if batch.uses_min_p else None
        apply_top_k_top_p_min_p_(scores, top_k, top_p, min_p, candidates=batch.candidates)
    return scores.scatter_(1, token_ids[:, None], chosen)


class Sampler:
    """Samples the next token of every row."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, logits: Tensor, batch: SamplingMetadata) -> SamplerOutput:
        """Sample one token per row of ``logits [N, V]`` (any float dtype, not modified)."""
        edited = _edit(logits.to(torch.float32, copy=True), batch) if batch.edits_logits else logits
        flags = SamplingFlags(batch.all_greedy, batch.candidates, batch.uses_min_p)
        if self._backend.is_invariant:  # rows of any batch take the same way through the same kernel
            edited, flags = edited.float(), SamplingFlags(False, logits.shape[1], True)
        token_ids, nan_rows = sample(
            edited,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seeds,
            batch.positions,
            flags,
            backend=self._backend,
        )
        return SamplerOutput(token_ids, nan_rows)


def _edit(logits: Tensor, batch: SamplingMetadata) -> Tensor:
    """Processors, masks, bias and penalties, in place."""
    for row, process in (batch.processors or {}).items():
        logits[row] = process(logits[row])
    if batch.allowed is not None:
        logits.masked_fill_(~batch.allowed, -torch.inf)
    if batch.blocked is not None:
        values = torch.where(batch.blocked.active, -torch.inf, 0.0).to(logits.dtype)
        _add_(logits, batch.blocked.rows, batch.blocked.tokens, values)
    if batch.bias is not None:
        _add_(logits, batch.bias.rows, batch.bias.tokens, batch.bias.values)
    if batch.penalties is not None:
        p = batch.penalties
        apply_penalties_(logits, p.presence, p.frequency, p.repetition, p.output_counts, p.prompt_mask)
    return logits


def _add_(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """``logits[rows, tokens] += values``, in place, of contiguous logits and tokens below V: no row is checked for its
    end. ``index_put_`` would sort the pairs, by kernels that take a tenth of a second to load."""
    logits.view(-1).index_add_(0, rows * logits.shape[1] + tokens, values)
