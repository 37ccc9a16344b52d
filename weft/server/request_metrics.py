"""Metrics of requests: counters and histograms of one server process, as plain numbers that add up over processes.

Job: count calls, requests and steps as they end. Owns: names, bounds and meanings of these counters and histograms.
Does not know: Prometheus' format (``metrics.py``), routes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from weft.engine.response_stream import ResponseStream
from weft.request import Request

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LONG = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
)  # fmt: skip
_ITERATION = (1.0, *(2.0**e for e in range(3, 15)))
_TOKENS = tuple(float(10**e * m) for e in range(6) for m in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Described:
    """Description of a counter or histogram. ``bounds``: upper ends of a histogram's buckets without infinity."""

    help: str
    bounds: tuple[float, ...] = ()


HISTOGRAMS = {
    "time_to_first_token_seconds": Described("time from arrival to the first token", _SECONDS),
    "time_per_output_token_seconds": Described("mean time per token after the first", _SECONDS),
    "request_time_per_output_token_seconds": Described("the same, under vLLM's new name", _SECONDS),
    "inter_token_latency_seconds": Described("time between two tokens of a request", _SECONDS),
    "iteration_tokens_total": Described(
        "tokens that a step gave, with those of the prompts that it finished", _ITERATION
    ),
    "request_queue_time_seconds": Described("time until a request was first scheduled", _LONG),
    "request_prefill_time_seconds": Described("time from the first schedule to the first token", _LONG),
    "request_inference_time_seconds": Described("time from the first schedule to the last token", _LONG),
    "request_decode_time_seconds": Described("time from the first token to the last", _LONG),
    "e2e_request_latency_seconds": Described("time from arrival to the last token", _LONG),
    "request_prompt_tokens": Described("prompt tokens per request", _TOKENS),
    "request_generation_tokens": Described("generated tokens per request", _TOKENS),
    "request_prefill_kv_computed_tokens": Described(
        "prompt tokens per request that were not found in the cache", _TOKENS
    ),
    "request_params_max_tokens": Described("most tokens that a request may generate", _TOKENS),
    "request_params_n": Described("completions per prompt", (1.0, 2.0, 5.0, 10.0, 20.0)),
}
COUNTERS = {
    "prompt_tokens": Described("prompt tokens of all requests"),
    "generation_tokens": Described("generated tokens"),
    "prefix_cache_queries": Described("prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": Described("prompt tokens found in the prefix cache"),
    "prompt_tokens_cached": Described("the same, under the name beside prompt_tokens"),
    "corrupted_requests": Described("requests that ended because the model or its step broke"),
}


class Counts(msgspec.Struct):
    """The numbers, as one process sends them to another.

    Attributes:
        counters: by name.
        buckets, sums: counts and sums of the histograms, by name. A bucket counts the values between the previous bound
            and its own.
        ended: requests by finish reason.
        responses: by path and status.
    """

    counters: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    buckets: dict[str, list[int]] = msgspec.field(
        default_factory=lambda: {name: [0] * (len(one.bounds) + 1) for name, one in HISTOGRAMS.items()}
    )
    sums: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(HISTOGRAMS, 0.0))
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    responses: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)

    def observe(self, name: str, value: float, count: int = 1) -> None:
        """Count a value in a histogram, ``count`` times."""
        self.buckets[name][bisect_left(HISTOGRAMS[name].bounds, value)] += count
        self.sums[name] += value * count

    def add(self, other: Counts) -> None:
        """Add the numbers of another process."""
        for mine, its in ((self.counters, other.counters), (self.ended, other.ended)):
            for key, value in its.items():
                mine[key] = mine.get(key, 0) + value
        for place, value in other.responses.items():
            self.responses[place] = self.responses.get(place, 0) + value
        for name, counts in other.buckets.items():
            self.buckets[name] = [a + b for a, b in zip(self.buckets[name], counts, strict=True)]
            self.sums[name] += other.sums[name]


class RequestMetrics:
    """Counts calls, requests and steps as they end. Implements ``TokenTimes``."""

    def __init__(self) -> None:
        self.counts = Counts()

    def first_token(self, seconds: float) -> None:
        """Ignore the time, which is counted when the call ends."""

    def next_tokens(self, seconds: float, count: int) -> None:
        self.counts.observe("inter_token_latency_seconds", seconds, count)

    def iteration(self, num_tokens: int) -> None:
        self.counts.observe("iteration_tokens_total", num_tokens)

    def responded(self, path: str, status: int) -> None:
        responses = self.counts.responses
        responses[path, status] = responses.get((path, status), 0) + 1

    def ended(self, stream: ResponseStream) -> int:
        """Count a call that has ended. Returns how many of its requests the engine ended with an error."""
        broken = 0
        for output in stream.outputs:
            requests = output.requests
            self.counts.observe("request_params_n", len(requests))
            for request in requests:
                self._ended(request)
                broken += request.is_broken
        self.counts.counters["corrupted_requests"] += broken
        return broken

    def _ended(self, request: Request) -> None:
        counts, counters = self.counts, self.counts.counters
        reason = request.finish_reason or "abort"
        counts.ended[reason] = counts.ended.get(reason, 0) + 1
        counters["prompt_tokens"] += request.num_prompt_tokens
        counters["generation_tokens"] += len(request.output_token_ids)
        if request.num_cached_tokens is not None:
            counters["prefix_cache_queries"] += request.num_prompt_tokens
            counters["prefix_cache_hits"] += request.num_cached_tokens
            counters["prompt_tokens_cached"] += request.num_cached_tokens
        for name, value in _figures(request):
            counts.observe(name, value)


def _figures(request: Request) -> Iterable[tuple[str, float]]:
    times, generated = request.times, len(request.output_token_ids)
    yield "request_prompt_tokens", request.num_prompt_tokens
    yield "request_generation_tokens", generated
    yield "request_params_max_tokens", request.max_tokens
    if request.num_cached_tokens is not None:
        yield "request_prefill_kv_computed_tokens", request.num_prompt_tokens - request.num_cached_tokens
    if times.first_scheduled is not None:
        yield "request_queue_time_seconds", times.first_scheduled - times.arrival
    if times.first_token is not None:
        yield "time_to_first_token_seconds", times.first_token - times.arrival
        if times.first_scheduled is not None:
            yield "request_prefill_time_seconds", times.first_token - times.first_scheduled
    if times.finished is not None:
        yield "e2e_request_latency_seconds", times.finished - times.arrival
        if times.first_scheduled is not None:
            yield "request_inference_time_seconds", times.finished - times.first_scheduled
        if times.first_token is not None:
            decode = times.finished - times.first_token
            yield "request_decode_time_seconds", decode
            if generated > 1:
                yield "time_per_output_token_seconds", decode / (generated - 1)
                yield "request_time_per_output_token_seconds", decode / (generated - 1)
