"""Prometheus metrics.

Job: gauges, counters and histograms under the names that dashboards for vLLM use (``vllm:…``, same meaning and labels),
and Weft's own (``weft:…``). Owns: the registry. Does not know: routes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.engine.async_engine import ResponseStream
from weft.request import Request
from weft.server.service import Service

COMPLETION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_ITERATION = (1.0, *(2.0**e for e in range(3, 15)))
_TOKENS = tuple(float(10**e * m) for e in range(6) for m in (1, 2, 5))

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time from arrival to the first token", _SECONDS),
    "time_per_output_token_seconds": ("mean time per token after the first", _SECONDS),
    "request_time_per_output_token_seconds": ("the same, under vLLM's new name", _SECONDS),
    "request_queue_time_seconds": ("time until a request was first scheduled", _LONG),
    "request_prefill_time_seconds": ("time from the first schedule to the first token", _LONG),
    "request_inference_time_seconds": ("time from the first schedule to the last token", _LONG),
    "request_decode_time_seconds": ("time from the first token to the last", _LONG),
    "e2e_request_latency_seconds": ("time from arrival to the last token", _LONG),
    "request_prompt_tokens": ("prompt tokens per request", _TOKENS),
    "request_generation_tokens": ("generated tokens per request", _TOKENS),
    "request_prefill_kv_computed_tokens": ("prompt tokens per request that were not found in the cache", _TOKENS),
    "request_params_max_tokens": ("most tokens that a request may generate", _TOKENS),
    "request_params_n": ("completions per prompt", (1.0, 2.0, 5.0, 10.0, 20.0)),
}
_STEP_HISTOGRAMS = {
    "inter_token_latency_seconds": ("time between two tokens of a request", _SECONDS),
    "iteration_tokens_total": ("tokens that a step gave, with those of the prompts that it finished", _ITERATION),
}
_COUNTERS = {
    "prompt_tokens": "prompt tokens of all requests",
    "generation_tokens": "generated tokens",
    "prefix_cache_queries": "prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "prompt tokens found in the prefix cache",
    "prompt_tokens_cached": "the same, under the name beside prompt_tokens",
    "corrupted_requests": "requests that the engine ended with an error",
}


class _TokenMetrics(Collector):
    """Histograms of what happens with every step, counted by hand: rows with the same time cost one look-up."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._counts = {name: [0] * (len(bounds) + 1) for name, (_, bounds) in _STEP_HISTOGRAMS.items()}
        self._sums = dict.fromkeys(_STEP_HISTOGRAMS, 0.0)

    def first_token(self, seconds: float) -> None:
        """Counted when the call ends."""

    def next_tokens(self, seconds: float, count: int) -> None:
        self._observe("inter_token_latency_seconds", seconds, count)

    def iteration(self, num_tokens: int) -> None:
        self._observe("iteration_tokens_total", num_tokens, 1)

    def _observe(self, name: str, value: float, count: int) -> None:
        self._counts[name][bisect_left(_STEP_HISTOGRAMS[name][1], value)] += count
        self._sums[name] += value * count

    def collect(self) -> Iterable[Any]:
        if self._service.open_engine is None:
            return
        for name, (help, bounds) in _STEP_HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", help, labels=["model_name", "engine"])
            edges = [*(floatToGoString(bound) for bound in bounds), "+Inf"]
            buckets = list(zip(edges, map(float, accumulate(self._counts[name])), strict=True))
            family.add_metric([self._service.model_name, "0"], buckets, self._sums[name])
            yield family


class Metrics:
    """All metrics of one service. Request figures are taken when a call ends."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))
        tokens = _TokenMetrics(service)
        self._registry.register(tokens)
        service.token_times.append(tokens)
        labels = ("model_name", "engine")
        self._histograms = {
            name: Histogram(f"vllm:{name}", help, labels, buckets=buckets, registry=self._registry)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", help, labels, registry=self._registry) for name, help in _COUNTERS.items()
        }
        self._children: dict[str, Any] = {}  # the same with their labels, which cost more to look up than to count
        self._success = Counter(
            "vllm:request_success",
            "requests that ended, by reason",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._responses = Counter(
            "weft:http_responses", "responses by path and status", ("path", "status"), registry=self._registry
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def responded(self, path: str, status: int) -> None:
        """``path`` is a route, never what a caller made up."""
        self._responses.labels(path, str(status)).inc()
        if path in COMPLETION_PATHS:
            self._service.history.responded(status)

    def observe(self, stream: ResponseStream) -> None:
        """A call has ended."""
        labels = (self._service.model_name, "0")
        if not self._children:
            metrics = self._histograms | self._counters
            self._children = {name: metric.labels(*labels) for name, metric in metrics.items()}
        for output in stream.outputs:
            self._children["request_params_n"].observe(len(output.requests))
            for request in output.requests:
                self._observe_request(request, labels)

    def _observe_request(self, request: Request, labels: tuple[str, str]) -> None:
        generated = len(request.output_token_ids)
        self._children["prompt_tokens"].inc(request.num_prompt_tokens)
        self._children["generation_tokens"].inc(generated)
        self._success.labels(*labels, request.finish_reason or "abort").inc()
        if request.finish_reason == "error":
            self._children["corrupted_requests"].inc()
            self._service.history.broke()
        if request.num_cached_tokens is not None:
            self._children["prefix_cache_queries"].inc(request.num_prompt_tokens)
            self._children["prefix_cache_hits"].inc(request.num_cached_tokens)
            self._children["prompt_tokens_cached"].inc(request.num_cached_tokens)
        for name, value in _figures(request):
            self._children[name].observe(value)


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


class _EngineCollector(Collector):
    """Gauges read from the engine's last report."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Any]:
        service = self._service
        yield _gauge(
            "weft:engine_up",
            "1 while the engine takes requests",
            float(service.unhealthy_reason is None and not service.is_restarting),
        )
        yield _gauge("weft:event_loop_tasks", "tasks of the server's event loop", len(asyncio.all_tasks()))
        yield _counter("weft:engine_restarts", "engines started after one had died", service.num_restarts)
        engine = service.open_engine
        if engine is None:
            return
        stats, capacity = engine.stats, service.capacity
        labels = {"model_name": service.model_name, "engine": "0"}
        pages, slots = capacity.num_pages - 1, max(0, capacity.num_slots - 1)
        if not stats.num_steps:  # it has not reported yet
            stats = replace(stats, num_free_pages=pages, num_free_slots=slots)
        used = 1.0 - (stats.num_free_pages + stats.num_evictable_pages) / max(1, pages)
        yield _gauge("vllm:num_requests_running", "requests in the batch", stats.num_running, labels)
        yield _gauge("vllm:num_requests_waiting", "requests that wait for a place", stats.num_waiting, labels)
        waiting = {"capacity": stats.num_waiting, "deferred": 0}
        yield _gauges("vllm:num_requests_waiting_by_reason", "requests that wait, by reason", "reason", waiting, labels)
        yield _gauge("vllm:cache_config_info", "1; its labels are settings of the cache", 1.0, labels | _cache(service))
        yield _gauge("vllm:kv_cache_usage_perc", "share of KV pages that requests hold, 1 is all", used, labels)
        yield _counter("vllm:num_preemptions", "requests preempted", stats.num_preemptions, labels)
        yield _counter("weft:stalls", "preemptions without progress since the last", stats.num_stalls, labels)
        yield _gauge("weft:kv_pages", "KV pages in all", pages, labels)
        yield _gauge("weft:kv_pages_free", "KV pages that hold nothing", stats.num_free_pages, labels)
        yield _gauge("weft:kv_pages_cached", "KV pages kept for reuse only", stats.num_evictable_pages, labels)
        yield _gauge("weft:state_slots", "recurrent-state slots in all", slots, labels)
        yield _gauge("weft:state_slots_free", "recurrent-state slots that hold nothing", stats.num_free_slots, labels)
        yield _gauge("weft:state_slots_cached", "states kept for reuse only", stats.num_evictable_slots, labels)
        yield _counter("weft:evicted_pages", "KV pages given up for new requests", stats.num_evicted_pages, labels)
        yield _counter("weft:evicted_states", "states given up for new requests", stats.num_evicted_states, labels)
        yield _counter("weft:engine_steps", "steps run", stats.num_steps, labels)
        yield _counters("weft:steps", "steps by how they ran", "mode", stats.steps_by_mode, labels)
        for name, values in (service.replicas or {}).items():
            yield _gauges(f"weft:replica_{name}", f"{name}, by replica", "replica", values, labels)
        tokens = {
            "prefill": stats.num_prefill_tokens,
            "decode": stats.num_decode_tokens,
            "padding": stats.num_padding_tokens,
        }
        yield _counters("weft:step_tokens", "tokens computed, and padding of captured graphs", "kind", tokens, labels)
        profile = Path(service.config.graph_profile).name if service.config.graph_profile else "none"
        graphs = {"mode": service.config.cuda_graph_mode, "profile": profile}
        yield _gauge("weft:graph_profile_info", "1; how batches are assigned to graphs", 1.0, labels | graphs)
        yield _gauge("weft:open_completions", "completions accepted and not ended", service.admission.num_open, labels)


def _gauge(name: str, help: str, value: float, labels: dict[str, str] | None = None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help, labels=list(labels or ()))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _gauges(name: str, help: str, label: str, values: dict[str, int], labels: dict[str, str]) -> GaugeMetricFamily:
    """One gauge for each value of a further label."""
    family = GaugeMetricFamily(name, help, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def _cache(service: Service) -> dict[str, str]:
    """Settings of the cache, under vLLM's names."""
    config, capacity = service.config, service.capacity
    num_tokens = (capacity.num_pages - 1) * capacity.page_size
    return {
        "block_size": str(capacity.page_size),
        "num_gpu_blocks": str(capacity.num_pages - 1),
        "cache_dtype": config.dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_size_tokens": str(num_tokens),
        "kv_cache_max_concurrency": f"{num_tokens / capacity.max_model_len:.2f}",
    }


def _counter(name: str, help: str, value: float, labels: dict[str, str] | None = None) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help, labels=list(labels or ()))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _counters(name: str, help: str, label: str, values: dict[str, int], labels: dict[str, str]) -> CounterMetricFamily:
    """One counter for each value of a further label."""
    family = CounterMetricFamily(name, help, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
