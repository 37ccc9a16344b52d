"""A request inside the engine: its tokens, its progress, its end.

Job: hold a request's fields and its progress. Owns: progress counters and the tokens so far. Does not know: pages,
slots, rows of the runner, text. A prompt with ``n > 1`` is ``n`` requests.

Progress, in tokens. ``prompt + output`` are known on the host. ``pending`` were sampled by launched steps whose results
are not back yet; with drafts, all of them are assumed to be accepted::

    |<---------- prompt ---------->|<--- output --->|<- pending ->|
    |<------- num_computed_tokens (fed to the model) ------>|
"""

import enum
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec

from weft.messages import RowSampling, TokenLogprobs
from weft.multimodal.items import MediaItem, cache_token_ids
from weft.outputs import CacheReport

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestTimes:
    """Moments of a request's life in seconds of ``time.monotonic()``; None if not reached."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    last_token: float | None = None
    """When the server's process received the latest token."""


class RequestSpec(msgspec.Struct, frozen=True, tag="add"):
    """The complete, immutable description of a request, and the message by which the server hands it to the engine.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one token, of type code ``"I"`` (4 bytes each), never changed. A list would be sent,
            converted and freed number by number.
        sampling: resolved sampling parameters, for the runner.
        max_tokens: upper bound on generated tokens. Prompt and output together fit the context.
        arrival: number of the request in the order of arrival.
        stop_token_ids: ids that end the generation as the user's stop tokens; the id is the ``stop_reason``.
        eos_token_ids: ids that end the generation as the model's own end (empty under ``ignore_eos``).
        priority: priority under the ``priority`` policy; smaller runs first.
        cache_salt: the request reuses cached prefixes under the same salt only, and its own are cached under it.
        checkpoint_positions: prompt positions at which later prompts may diverge, for recurrent states.
        media: images and videos of the prompt, in the order of their placeholders.
        caller: identity of an API key, or a connection. Callers get fair shares of the engine.
        arrival_time: time of acceptance, ``time.monotonic()``.
    """

    request_id: str
    prompt_token_ids: array
    sampling: RowSampling
    max_tokens: int
    arrival: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str | None = None
    checkpoint_positions: list[int] = []
    media: list[MediaItem] = []
    caller: str = ""
    arrival_time: float = msgspec.field(default_factory=time.monotonic)


class Request(RequestSpec, frozen=False, eq=False):  # type: ignore[misc]  # msgspec allows it
    """A request as the scheduler sees it: its spec, and its progress.

    Attributes:
        logits_processors: callables of the user that change its logits, in order; see ``SamplingParams``. They cannot
            leave the process, so they are not part of the spec.
        num_computed_tokens: tokens fed to the model, counted when a step is launched.
        num_pending: number of tokens sampled by launched steps whose results are not back yet.
        admission: number of the request in the order of admission; None before.
        num_cached_tokens: number of prompt tokens reused from the cache when it was first scheduled.
        cache_report: the prefix that it found in the cache then.
        draft_token_ids: drafts made on the device, to follow the known tokens.
        num_draft_tokens, num_accepted_tokens: number of drafts verified for it, and of accepted ones.
        no_drafts_because: the reason why nothing is drafted for it although the engine speculates.
        max_computed_tokens: maximum of ``num_computed_tokens`` so far. Tokens below it are computed again.
        progress_when_preempted: number of tokens that all requests together had computed for the first time when this
            one was last preempted.
        prompt_logprobs: entries for prompt positions 1, 2, … as they arrive.
        weight_spans: the place of the first generated token that a version of the weights computed, and the version.
    """

    logits_processors: tuple[Callable[..., Any], ...] = ()
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = []
    num_computed_tokens: int = 0
    num_pending: int = 0
    admission: int | None = None
    num_cached_tokens: int | None = None
    cache_report: CacheReport | None = None
    num_preemptions: int = 0
    draft_token_ids: list[int] = []
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    no_drafts_because: str = ""
    max_computed_tokens: int = 0
    progress_when_preempted: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    weight_spans: tuple[tuple[int, int], ...] = ((0, 0),)
    times: RequestTimes = msgspec.field(default_factory=RequestTimes)

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a request needs at least one prompt token"
        assert self.max_tokens >= 1, "a request generates at least one token"
        self.times.arrival = self.arrival_time

    @classmethod
    def of(cls, spec: RequestSpec) -> Self:
        return cls(**{name: getattr(spec, name) for name in RequestSpec.__struct_fields__})

    @property
    def spec(self) -> RequestSpec:
        return RequestSpec(**{name: getattr(self, name) for name in RequestSpec.__struct_fields__})

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the request, pending ones included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_tokens_to_compute(self) -> int:
        """Number of tokens to feed before the next one can be sampled."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return known + self.num_pending - self.num_computed_tokens

    @property
    def known_token_ids(self) -> array:
        """Prompt and output known on the host."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        return self.prompt_token_ids + array("I", self.output_token_ids)

    @property
    def cache_token_ids(self) -> Sequence[int]:
        """Prompt and output known on the host, with the keys of the prefix cache for images."""
        known = self.known_token_ids
        return cache_token_ids(known, self.media) if self.media else known

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def is_broken(self) -> bool:
        """Whether the request ended with an error that its own options did not cause."""
        return self.finish_reason == "error" and self.stop_reason is None

    @property
    def samples_by_history(self) -> bool:
        """Whether sampling a token needs all earlier tokens on the host."""
        return self.sampling.grammar is not None or bool(self.logits_processors)

    @property
    def needs_tokens_on_host(self) -> bool:
        """Whether preparing a step needs all earlier tokens on the host."""
        return self.samples_by_history or self.sampling.edits_logits

    @property
    def will_be_full(self) -> bool:
        """Whether output and pending tokens reach ``max_tokens``, so that no further step may be launched."""
        return len(self.output_token_ids) + self.num_pending >= self.max_tokens

    def drop_pixels(self) -> None:
        """Drop pixels, since nothing will be encoded any more. The positions and identities of images are kept."""
        self.media = [item.without_pixels() for item in self.media]  # type: ignore[misc]  # the field belongs to the spec

    def note_version(self, version: int) -> None:
        """Note that the next tokens are computed with this version of the weights."""
        start = len(self.output_token_ids)
        if version != self.weight_spans[-1][1]:
            self.weight_spans = (*(span for span in self.weight_spans if span[0] < start), (start, version))

    def end(self, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End the request now, from outside."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.status = RequestStatus.FINISHED
        self.times.finished = time.monotonic()

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append sampled tokens, with log probabilities if there are some. Tokens after the end are dropped."""
        for place, token_id in enumerate(token_ids):
            self.append(token_id, logprobs[place] if logprobs else None)
            if self.finish_reason is not None:
                break

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Append a sampled token. Sets ``finish_reason`` if it ends the generation."""
        self.output_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.times.first_token is None:
            self.times.first_token = time.monotonic()
        self._check_stop(token_id)

    def _check_stop(self, token_id: int) -> None:
        enough = len(self.output_token_ids) >= self.sampling.min_tokens
        if enough and token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif enough and token_id in self.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif len(self.output_token_ids) >= self.max_tokens:
            self.finish_reason = "length"
