"""OpenTelemetry: a span for each call, with its queue, prefill and decode below it.

Job: convert a call that has ended to spans, under the semantic conventions for generative AI, and export them.
Owns: attribute names. Does not know: prompts or answers: neither is ever exported.

Loaded only if ``--otlp-traces-endpoint`` is given; needs the extra ``weft[otel]``. The span of the caller's
``traceparent`` is the parent, and its decision to sample is followed; otherwise the environment decides
(``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_EXPORTER_OTLP_HEADERS`` …).
"""

import threading
import time
from collections.abc import Iterator
from typing import Self
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context as SpanContexts
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from weft import __version__
from weft.engine.response_stream import ResponseStream
from weft.errors import ConfigError
from weft.request import Request, RequestTimes
from weft.sampling_params import SamplingParams
from weft.server.client import TraceParent

Value = str | bool | int | float | list[str]

_FLUSH_S = 2.0
"""Seconds to wait for the export of the last spans when the server ends."""


class Tracer:
    """Makes spans. ``processor`` takes them when they have ended."""

    def __init__(self, processor: SpanProcessor) -> None:
        named = {SERVICE_NAME: "weft", SERVICE_VERSION: __version__}
        resource = Resource.create(named).merge(OTELResourceDetector().detect())  # the environment's names win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("weft.server", __version__)

    @classmethod
    def towards(cls, endpoint: str) -> Self:
        """Make a tracer that exports to an OTLP collector over HTTP, in batches, from a thread.

        Args:
            endpoint: ``http://HOST:4318``; without a path, ``/v1/traces`` is meant.

        Raises:
            ConfigError: ``endpoint`` is no URL.
        """
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(
                f"otlp_traces_endpoint={endpoint!r} is not the URL of a collector; give one like http://localhost:4318"
            )
        if url.path in ("", "/"):
            endpoint = url._replace(path="/v1/traces").geturl()
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def ended(
        self, operation: str, model: str, call_id: str, params: SamplingParams, stream: ResponseStream,
        parent: TraceParent | None,
    ) -> None:  # fmt: skip
        """Make the spans of a call that has just ended. ``operation``: ``chat`` or ``text_completion``."""
        clock = time.time_ns() - time.monotonic_ns()  # spans want the time of day, requests have monotonic times
        first = stream.requests[0]
        context = _context(parent)
        start = _ns(first.times.arrival) + clock
        span = self._tracer.start_span(f"{operation} {model}", context, SpanKind.SERVER, start_time=start)
        if span.is_recording():
            names = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "weft", "gen_ai.response.id": call_id}
            models = {"gen_ai.request.model": model, "gen_ai.response.model": model}
            span.set_attributes(names | models | _asked(params) | _answered(stream))
            failed = next((request for request in stream.requests if request.finish_reason == "error"), None)
            if failed is not None:
                why = failed.stop_reason
                span.set_attribute("error.type", "model_error" if why is None else "invalid_request_error")
                text = "the model computed NaN or its step broke" if why is None else str(why)
                span.set_status(Status(StatusCode.ERROR, text))
            below = trace.set_span_in_context(span)
            for name, begin, end in _phases(first.times):
                phase = self._tracer.start_span(name, below, start_time=_ns(begin) + clock)
                phase.end(_ns(end) + clock)
        span.end(time.monotonic_ns() + clock)

    def close(self) -> None:
        """Export the remaining spans within ``_FLUSH_S``. The exporter would retry an absent collector for longer."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)


def _context(parent: TraceParent | None) -> SpanContexts:
    if parent is None:
        return SpanContexts()
    remote = trace.SpanContext(
        int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(parent.flags)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), SpanContexts())


def _phases(times: RequestTimes) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of the phases of the call's first completion. The last phase lasts until now."""
    now = times.finished or time.monotonic()
    moments = (
        ("queue", times.arrival, times.first_scheduled),
        ("prefill", times.first_scheduled, times.first_token),
        ("decode", times.first_token, now),
    )
    for name, begin, end in moments:
        if begin is not None:
            yield name, begin, max(begin, now if end is None else end)


def _asked(params: SamplingParams) -> dict[str, Value]:
    """Attributes of what the caller set."""
    given = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _answered(stream: ResponseStream) -> dict[str, Value]:
    """Tokens, ends and times; the names beside the conventions' own are those of vLLM's traces, and ``weft.*``."""
    requests = stream.requests
    prompts = [output.requests[0] for output in stream.outputs]
    first = requests[0]
    values: dict[str, Value] = {
        "gen_ai.usage.input_tokens": sum(request.num_prompt_tokens for request in prompts),
        "gen_ai.usage.output_tokens": sum(len(request.output_token_ids) for request in requests),
        "gen_ai.usage.cache_read.input_tokens": sum(request.num_cached_tokens or 0 for request in prompts),
        "gen_ai.response.finish_reasons": [request.finish_reason or "abort" for request in requests],
        "weft.num_preemptions": sum(request.num_preemptions for request in requests),
    }
    if first.cache_report is not None:
        values["weft.cache_report"] = str(first.cache_report)
    return values | _latencies(first)


def _latencies(request: Request) -> dict[str, Value]:
    """In seconds."""
    times = request.times
    spans = {
        "gen_ai.latency.time_in_queue": (times.arrival, times.first_scheduled),
        "gen_ai.latency.time_to_first_token": (times.arrival, times.first_token),
        "gen_ai.latency.time_in_model_prefill": (times.first_scheduled, times.first_token),
        "gen_ai.latency.time_in_model_decode": (times.first_token, times.finished),
        "gen_ai.latency.e2e": (times.arrival, times.finished),
    }
    return {name: end - begin for name, (begin, end) in spans.items() if begin is not None and end is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
