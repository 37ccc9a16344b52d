"""Results for the user: ``RequestOutput`` and ``CompletionOutput``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any


@dataclass(slots=True)
class Logprob:
    """Log probability of a token at one position.

    Attributes:
        logprob: natural logarithm of the probability before temperature, penalties and masks.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


LogprobsDict = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: 0 to ``n - 1``.
        text: generated text so far (empty under ``detokenize=False`` or without a tokenizer).
        token_ids: generated tokens so far; the stop token is included.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"error"`` (its options left no token to generate, the
            model produced NaN, or its step broke), or None while running.
        stop_reason: the stop string or stop token id that ended the completion. For an ``"error"`` caused by the
            request's options, these options. None for EOS and everything else.
        logprobs: per generated token, token id -> ``Logprob``; None if not asked for.
        cumulative_logprob: sum over the generated tokens; None if logprobs were not asked for.
        weight_spans: place of the first token that a version of the weights computed, and the version, in order.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobsDict] | None = None
    cumulative_logprob: float | None = None
    weight_spans: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def weight_versions(self) -> list[int]:
        """The version of the weights that computed each token of ``token_ids``, for a whole output."""
        versions: list[int] = []
        for start, version in self.weight_spans:
            versions[start:] = [version] * (len(self.token_ids) - start)
        return versions


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds since the request arrived; None if not reached yet.

    Attributes:
        time_in_queue: time until the request was first scheduled.
        time_to_first_token: time until the first token was known.
        e2e_latency: time until the last completion ended.
        num_preemptions: number of preemptions.
        num_draft_tokens, num_accepted_tokens: with speculative decoding, number of tokens drafted for the request, and
            of accepted ones.
        no_drafts_because: the reason why the request decoded without drafts although the engine speculates; empty
            otherwise.
    """

    time_in_queue: float | None = None
    time_to_first_token: float | None = None
    e2e_latency: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    no_drafts_because: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix that one request found in the cache, in tokens.

    Attributes:
        num_prompt_tokens: number of tokens looked up, after a preemption including generated ones.
        num_kv_tokens: leading tokens whose KV was stored.
        state_position: position of the nearest usable recurrent state, which equals the reuse; None without recurrent
            layers.
        num_reused_tokens: tokens that need not be computed.
        num_recomputed_tokens: number of tokens computed again although their KV was stored.
        reason: the reason why not everything was reused, in one or two sentences; empty if all but the last token was.
        num_restored_tokens: number of reused tokens that came from a tier below the device for this request.
        restored_from: name of that tier.
        restore_seconds: time from the order of the restore to its end.
    """

    num_prompt_tokens: int
    num_kv_tokens: int
    state_position: int | None
    num_reused_tokens: int
    num_recomputed_tokens: int
    reason: str
    num_restored_tokens: int = 0
    restored_from: str = ""
    restore_seconds: float = 0.0

    def restored(self, num_tokens: int, tier: str, seconds: float) -> CacheReport:
        """The report of a request for which ``num_tokens`` of the reused tokens were restored."""
        return replace(self, num_restored_tokens=num_tokens, restored_from=tier, restore_seconds=seconds)

    def __str__(self) -> str:
        found = self._found()
        if not self.num_restored_tokens:
            return found
        what = "KV" if self.state_position is None else "KV and state"
        num_computed = self.num_prompt_tokens - self.num_reused_tokens
        return (
            f"{what} of {self.num_restored_tokens:,} tokens restored from {self.restored_from} in "
            f"{1e3 * self.restore_seconds:.3g} ms; {num_computed:,} tokens computed; {found}"
        )

    def _found(self) -> str:
        parts = [f"KV matched {self.num_kv_tokens:,} of {self.num_prompt_tokens:,} tokens"]
        if self.state_position is not None:
            parts.append(f"nearest state at {self.state_position:,}")
        parts.append(f"recomputed {self.num_recomputed_tokens:,}")
        return ", ".join(parts) + (f": {self.reason}" if self.reason else "")


@dataclass(slots=True)
class RequestOutput:
    """The whole output of one prompt.

    Attributes:
        request_id: the id, given or assigned.
        prompt: the prompt's text; None if given as token ids.
        prompt_token_ids: its tokens.
        outputs: one entry per completion (``n``).
        finished: whether every completion has ended.
        num_cached_tokens: number of prompt tokens that were not computed.
        cache_report: the prefix found in the cache; None until the request was first scheduled.
        prompt_logprobs: None for the first token, then token id -> ``Logprob``; None if not asked for.
        metrics: times and counts.
        weight_version: version of the weights that computed the last tokens; 0 before the first update.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    cache_report: CacheReport | None = None
    prompt_logprobs: list[LogprobsDict | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    weight_version: int = 0


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Find names that vLLM has in its module of this name."""
        import weft

        return weft.find_name(__name__, name)
