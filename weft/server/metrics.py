"""Prometheus metrics.

Job: gauges, counters and histograms under the names that dashboards for vLLM use (``vllm:…``, same meaning and labels),
and Weft's own (``weft:…``). Owns: the gauges, and the format. Does not know: routes, how
calls are counted (``request_metrics.py``).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.engine.response_stream import ResponseStream
from weft.engine.snapshot import ReplicaView
from weft.server.request_metrics import COUNTERS, HISTOGRAMS, Counts, RequestMetrics
from weft.server.service import Service
from weft.stats import EngineStats

COMPLETION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

METRICS = "metrics"
"""Under this name API processes report their counts."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of one service. Request figures are taken when a call ends."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requests = RequestMetrics()
        service.token_times.append(self._requests)

    def report(self) -> bytes:
        """Encode the counts of this process, for ``text`` of any API process."""
        return msgspec.msgpack.encode(self._requests.counts)

    async def text(self) -> bytes:
        """The exposition format, of all API processes together."""
        counts = Counts()
        for report in await self._service.api_processes.gather(METRICS):
            counts.add(msgspec.msgpack.decode(report, type=Counts))
        registry = CollectorRegistry()
        registry.register(_EngineCollector(self._service))
        registry.register(_CallCollector(self._service, counts))
        return generate_latest(registry)

    def responded(self, path: str, status: int) -> None:
        """``path`` is a route, never what a caller made up."""
        self._requests.responded(path, status)
        if path in COMPLETION_PATHS:
            self._service.history.responded(status)

    def observe(self, stream: ResponseStream) -> None:
        """A call has ended."""
        for _ in range(self._requests.ended(stream)):
            self._service.history.broke()


class _CallCollector(Collector):
    """Metrics of calls."""

    def __init__(self, service: Service, counts: Counts) -> None:
        self._service = service
        self._counts = counts

    def collect(self) -> Iterable[Any]:
        counts = self._counts
        responses = CounterMetricFamily(
            "weft:http_responses", "responses by path and status", labels=["path", "status"]
        )
        for (path, status), value in counts.responses.items():
            responses.add_metric([path, str(status)], value)
        yield responses
        if self._service.open_engine is None:
            return
        labels = {"model_name": self._service.model_name, "engine": "0"}
        for name, counter in COUNTERS.items():
            yield _counter(f"vllm:{name}", counter.help, counts.counters[name], labels)
        yield _counters(
            "vllm:request_success", "requests that ended, by reason", "finished_reason", counts.ended, labels
        )
        for name, histogram in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", histogram.help, labels=list(labels))
            edges = [*(floatToGoString(bound) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(edges, map(float, accumulate(counts.buckets[name])), strict=True))
            family.add_metric(list(labels.values()), buckets, counts.sums[name])
            yield family


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
        pages, slots = capacity.num_pages, capacity.num_slots
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
        if service.config.speculative_config is not None:
            yield from _drafts(stats, labels)
        if service.config.model_config.runs_vision:
            yield from _images(stats, labels)
        if service.config.kv_offloading_size:
            yield from _host_tier(stats, labels)
        yield _gauge("weft:kv_pages", "KV pages in all", pages, labels)
        yield _gauge("weft:kv_pages_free", "KV pages that hold nothing", stats.num_free_pages, labels)
        yield _gauge("weft:kv_pages_cached", "KV pages kept for reuse only", stats.num_evictable_pages, labels)
        yield _gauge("weft:state_slots", "recurrent-state slots in all", slots, labels)
        yield _gauge("weft:state_slots_free", "recurrent-state slots that hold nothing", stats.num_free_slots, labels)
        yield _gauge("weft:state_slots_cached", "states kept for reuse only", stats.num_evictable_slots, labels)
        yield _counter("weft:evicted_pages", "KV pages given up for new requests", stats.num_evicted_pages, labels)
        yield _counter("weft:evicted_states", "states given up for new requests", stats.num_evicted_states, labels)
        yield _gauge("weft:weight_version", "version of the weights, 0 at the start", stats.weight_version, labels)
        yield _counter("weft:engine_steps", "steps run", stats.num_steps, labels)
        yield _counters("weft:steps", "steps by how they ran", "mode", stats.steps_by_mode, labels)
        for name, values in _replica_figures(service.engine_client.replicas or []).items():
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


def _images(stats: EngineStats, labels: dict[str, str]) -> Iterable[Any]:
    """The vision tower and its cache."""
    queries, hits = stats.num_encoder_queries, stats.num_encoder_hits
    yield _counter("weft:encoder_queries", "images and videos whose embeddings a step needed", queries, labels)
    yield _counter("weft:encoder_hits", "of these, those whose embeddings were kept", hits, labels)
    yield _counter("weft:encoder_seconds", "seconds of encoding the others", stats.encoder_seconds, labels)
    yield _gauge("weft:encoder_cache_tokens", "tokens whose embeddings are kept", stats.encoder_cache_tokens, labels)


def _host_tier(stats: EngineStats, labels: dict[str, str]) -> Iterable[Any]:
    """The tier in host memory, under vLLM's names where there are some."""
    name, help = "vllm:external_prefix_cache", "prompt tokens that the device did not have"
    yield _counter(f"{name}_queries", help, stats.num_external_query_tokens, labels)
    help = "of these, tokens restored from host memory; they also count as hits of the prefix cache"
    yield _counter(f"{name}_hits", help, stats.num_external_hit_tokens, labels)
    sizes = {"GPU_to_CPU": stats.stored_bytes, "CPU_to_GPU": stats.restored_bytes}
    seconds = {"GPU_to_CPU": stats.stored_seconds, "CPU_to_GPU": stats.restored_seconds}
    yield _counters("vllm:kv_offload_total_bytes", "bytes copied by one rank", "transfer_type", sizes, labels)
    yield _counters("vllm:kv_offload_total_time", "seconds of these copies", "transfer_type", seconds, labels)
    restores = {"begun": stats.num_restores, "refused": stats.num_refused_restores, "failed": stats.num_failed_restores}
    yield _counters("weft:restores", "restores of prefixes from host memory", "kind", restores, labels)
    files = {"saved": stats.num_disk_saves, "loaded": stats.num_disk_loads, "rejected": stats.num_rejected_files}
    files |= {"not_saved": stats.num_failed_saves, "evicted": stats.num_disk_evictions}
    yield _counters("weft:tier_files", "files of the disk tier, by what became of them", "kind", files, labels)
    yield _gauge("weft:host_pages", "places for KV pages in host memory", stats.host_pages, labels)
    yield _gauge("weft:host_pages_used", "of these, those in use", stats.host_pages_in_use, labels)
    yield _gauge("weft:host_states", "places for states in host memory", stats.host_states, labels)
    yield _gauge("weft:host_states_used", "of these, those in use", stats.host_states_in_use, labels)
    yield _counter("weft:host_evicted_pages", "KV pages evicted from host memory", stats.num_host_evicted_pages, labels)
    yield _counter("weft:host_evicted_states", "states evicted from host memory", stats.num_host_evicted_states, labels)


def _drafts(stats: EngineStats, labels: dict[str, str]) -> Iterable[Any]:
    """Speculative decoding, under vLLM's names."""
    name = "vllm:spec_decode_num"
    tokens, accepted = stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
    yield _counter(
        f"{name}_drafts", "how often drafts of a request were verified", stats.spec_decode_num_drafts, labels
    )
    yield _counter(f"{name}_draft_tokens", "tokens drafted", tokens, labels)
    yield _counter(f"{name}_accepted_tokens", "drafted tokens accepted", accepted, labels)
    by_position = stats.spec_decode_num_accepted_tokens_per_pos
    yield _counters(f"{name}_accepted_tokens_per_pos", "the same, by place", "position", by_position, labels)


def _cache(service: Service) -> dict[str, str]:
    """Settings of the cache, under vLLM's names."""
    config, capacity = service.config, service.capacity
    num_tokens = capacity.num_pages * capacity.page_size
    return {
        "block_size": str(capacity.page_size),
        "num_gpu_blocks": str(capacity.num_pages),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_size_tokens": str(num_tokens),
        "kv_cache_max_concurrency": f"{num_tokens / capacity.max_model_len:.2f}",
    }


Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def _one(kind: type[Family], name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    family = kind(name, help, labels=list(labels or ()))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _several(
    kind: type[Family], name: str, help: str, label: str, values: Mapping[str, float], labels: Mapping[str, str]
) -> Family:
    """One figure for each value of a further label."""
    family = kind(name, help, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


_gauge, _gauges = partial(_one, GaugeMetricFamily), partial(_several, GaugeMetricFamily)
_counter, _counters = partial(_one, CounterMetricFamily), partial(_several, CounterMetricFamily)


def _replica_figures(replicas: Sequence[ReplicaView]) -> dict[str, dict[str, int]]:
    """Return each figure with its values by replica number."""
    named = {name: name.removeprefix("num_") for name in ReplicaView.__struct_fields__ if name.startswith("num_")}
    figures = {short: {str(view.replica): getattr(view, name) for view in replicas} for name, short in named.items()}
    return {"up": {str(view.replica): int(view.state == "up") for view in replicas}} | figures if replicas else {}
