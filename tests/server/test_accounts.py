"""Metrics, logs and reports of calls and of the engine: each figure is shown under its own name."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from array import array
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weft.config import EngineConfig, resolve
from weft.engine import wire
from weft.engine.snapshot import ReplicaView
from weft.messages import RowSampling
from weft.outputs import CacheReport
from weft.processes.log_format import LogFormatter
from weft.processes.log_writer import LogHandler
from weft.request import FinishReason, Request
from weft.server import utility
from weft.server.api_call import _prompt_report
from weft.server.client import Client, TraceParent
from weft.server.metrics import _CallCollector, _EngineCollector, _images
from weft.server.request_metrics import Counts, RequestMetrics
from weft.server.requestlog import RequestLog
from weft.stats import EngineStats

REPORT = CacheReport(20, 16, None, 16, 0, "nothing more was there")


def ended(num_prompt: int, num_cached: int | None, num_output: int, reason: FinishReason | None) -> Request:
    """A request that arrived at 100 and was scheduled, began to answer and ended 2, 5 and 14 seconds later."""
    request = Request(f"r{num_prompt}", array("I", [1] * num_prompt), RowSampling(), max_tokens=50)
    request.output_token_ids = [2] * num_output
    request.num_cached_tokens, request.finish_reason, request.cache_report = num_cached, reason, REPORT
    request.times.arrival, request.times.first_scheduled = 100.0, 102.0
    request.times.first_token, request.times.finished = 105.0, 114.0
    return request


def stream_of(*prompts: list[Request]) -> Any:
    """Make the stream of a call with the given completions of each prompt."""
    outputs = [SimpleNamespace(requests=requests) for requests in prompts]
    return SimpleNamespace(outputs=outputs, requests=[request for requests in prompts for request in requests])


def test_figures_of_requests_are_counted_under_their_names() -> None:
    waiting = Request("w", array("I", [1] * 3), RowSampling(), max_tokens=7)  # aborted before it was scheduled
    waiting.times.arrival = 100.0
    metrics = RequestMetrics()
    prompts = [[ended(20, 16, 4, "stop"), ended(20, 16, 1, "error")], [waiting]]
    assert metrics.ended(stream_of(*prompts)) == 1
    metrics.next_tokens(0.25, 3)
    metrics.iteration(6)
    for status in (200, 200, 400):
        metrics.responded("/v1/completions", status)
    counts = metrics.counts
    assert counts.counters == {
        "prompt_tokens": 43, "generation_tokens": 5, "prefix_cache_queries": 40, "prefix_cache_hits": 32,
        "prompt_tokens_cached": 32, "corrupted_requests": 1,
    }  # fmt: skip
    assert counts.ended == {"stop": 1, "error": 1, "abort": 1}
    assert counts.responses == {("/v1/completions", 200): 2, ("/v1/completions", 400): 1}
    assert {name: (sum(counts.buckets[name]), total) for name, total in counts.sums.items()} == {
        "time_to_first_token_seconds": (2, 10), "time_per_output_token_seconds": (1, 3),
        "request_time_per_output_token_seconds": (1, 3), "inter_token_latency_seconds": (3, 0.75),
        "iteration_tokens_total": (1, 6), "request_queue_time_seconds": (2, 4), "request_prefill_time_seconds": (2, 6),
        "request_inference_time_seconds": (2, 24), "request_decode_time_seconds": (2, 18),
        "e2e_request_latency_seconds": (2, 28), "request_prompt_tokens": (3, 43), "request_generation_tokens": (3, 5),
        "request_prefill_kv_computed_tokens": (2, 8), "request_params_max_tokens": (3, 107), "request_params_n": (2, 3),
    }  # fmt: skip
    assert counts.buckets["request_params_n"] == [1, 1, 0, 0, 0, 0], "a bucket's bound is in it"
    told = values(_CallCollector(service_of(None, EngineStats()), counts).collect())
    assert len(told) == 2 + 6 + 3 + sum(len(buckets) + 2 for buckets in counts.buckets.values())
    for name, value in {
        "weft:http_responses_total /v1/completions 200": 2, "vllm:prompt_tokens_total": 43,
        "vllm:corrupted_requests_total": 1, "vllm:request_success_total abort": 1, "vllm:request_params_n_sum": 3,
        "vllm:request_params_n_bucket 1.0": 1, "vllm:request_params_n_bucket 2.0": 2, "vllm:request_params_n_count": 2,
    }.items():  # fmt: skip
        assert told[name] == value, name
    both = Counts()
    for report in (msgspec.msgpack.encode(counts), msgspec.msgpack.encode(counts)):  # of two API processes
        both.add(msgspec.msgpack.decode(report, type=Counts))
    for name in ("counters", "ended", "responses", "sums"):
        assert getattr(both, name) == {key: 2 * value for key, value in getattr(counts, name).items()}
    assert both.buckets == {name: [2 * count for count in found] for name, found in counts.buckets.items()}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lines that a request log writes, as objects."""
    found: list[dict[str, Any]] = []
    handler = LogHandler(SimpleNamespace(put=lambda line: found.append(json.loads(line))), LogFormatter(as_json=True))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("weft.requests"), "level", logging.INFO)
    return found


def test_a_call_is_logged_when_it_has_ended(lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 116.5)
    client = Client(trace=TraceParent("f" * 32, "e" * 16, 1))
    completions = [ended(20, 16, 4, "stop"), ended(20, 16, 1, None)]
    RequestLog().ended("cmpl-1", stream_of(completions, [ended(30, None, 6, "stop")]), client)
    (line,) = lines
    assert {name: line.pop(name) for name in list(line) if name not in ("time", "level", "logger", "message")} == {
        "request_id": "cmpl-1", "trace_id": "f" * 32, "prompt_tokens": 50, "cached_tokens": 16, "completion_tokens": 11,
        "finish_reasons": ["abort", "stop"], "queue_s": 2.0, "ttft_s": 5.0, "e2e_s": 16.5, "cache": str(REPORT),
    }  # fmt: skip


def test_the_field_weft_tells_where_the_time_went() -> None:
    metrics = SimpleNamespace(num_preemptions=1, time_in_queue=2.0, time_to_first_token=None, e2e_latency=4.00000049)
    completions = [SimpleNamespace(weight_spans=[(2, 0)]), SimpleNamespace(weight_spans=[(2, 0), (3, 5)])]
    result = SimpleNamespace(
        cache_report=REPORT, num_cached_tokens=7, metrics=metrics, weight_version=3, outputs=completions
    )
    output: Any = SimpleNamespace(output=lambda: result)
    assert _prompt_report(output) == {
        "cache": str(REPORT), "cached_tokens": 7, "weight_version": 3,
        "weight_spans": [[(2, 0)], [(2, 0), (3, 5)]], "num_preemptions": 1, "time_in_queue_s": 2.0,
        "time_to_first_token_s": None, "e2e_latency_s": 4.0,
    }  # fmt: skip


# -- the engine ------------------------------------------------------------------------------------------------------

CAPACITY = wire.Capacity(max_model_len=64, max_num_seqs=4, num_pages=100, page_size=16, num_slots=20)
MODEL = {"model_name": "mini", "engine": "0"}


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return resolve(device="cpu", kv_cache_dtype="fp8", graph_profile="none")


def service_of(config: Any, stats: EngineStats, **fields: Any) -> Any:
    names = {"model_name": "mini", "unhealthy_reason": None, "is_restarting": False, "num_restarts": 2}
    engine, admission = SimpleNamespace(stats=stats), SimpleNamespace(num_open=19, limit=44)
    client = SimpleNamespace(replicas=None)
    rest = {"open_engine": engine, "engine": engine, "admission": admission, "engine_client": client}
    return SimpleNamespace(**names | rest | {"config": config, "capacity": CAPACITY} | fields)


OWN = {"weft:engine_up", "weft:event_loop_tasks", "weft:engine_restarts", "weft:http_responses"}
"""Metrics that are there without an engine."""


def values(families: Iterable[Any]) -> dict[str, float]:
    """By name and labels, without the model's, which all but the server's own have."""
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in MODEL]
            if family.name not in OWN:
                assert {name: sample.labels.get(name) for name in MODEL} == MODEL
            if not sample.name.endswith("_created"):
                found[" ".join((sample.name, *labels))] = sample.value
    return found


def collected(service: Any) -> dict[str, float]:
    async def collect() -> dict[str, float]:
        return values(_EngineCollector(service).collect())

    found = asyncio.run(collect())
    assert found.pop("weft:event_loop_tasks") == 1
    return found


STATS = EngineStats(
    num_free_pages=10, num_evictable_pages=15, num_free_slots=3, num_evictable_slots=4, num_evicted_pages=5,
    num_evicted_states=6, num_waiting=7, num_running=8, num_preemptions=9, num_stalls=11, num_steps=12,
    num_prefill_tokens=13, num_decode_tokens=14, num_padding_tokens=16, steps_by_mode={"NONE": 17, "FULL": 18},
    num_encoder_queries=21, num_encoder_hits=22, encoder_seconds=0.5, encoder_cache_tokens=23, weight_version=24,
)  # fmt: skip


def test_every_figure_of_the_engine_has_its_name(config: EngineConfig) -> None:
    found = collected(service_of(config, STATS))
    (info,) = (name for name in found if name.startswith("vllm:cache_config_info"))
    assert found.pop(info) == 1
    assert info.split()[1:] == ["16", "100", "fp8", "True", str(config.gpu_memory_utilization), "1600", "25.00"]
    assert found == {
        "weft:engine_up": 1, "weft:engine_restarts_total": 2, "vllm:num_requests_running": 8,
        "vllm:num_requests_waiting": 7, "vllm:num_requests_waiting_by_reason capacity": 7,
        "vllm:num_requests_waiting_by_reason deferred": 0, "vllm:kv_cache_usage_perc": 0.75,
        "vllm:num_preemptions_total": 9, "weft:stalls_total": 11, "weft:kv_pages": 100, "weft:kv_pages_free": 10,
        "weft:kv_pages_cached": 15, "weft:state_slots": 20, "weft:state_slots_free": 3, "weft:state_slots_cached": 4,
        "weft:evicted_pages_total": 5, "weft:evicted_states_total": 6, "weft:engine_steps_total": 12,
        "weft:steps_total NONE": 17, "weft:steps_total FULL": 18, "weft:step_tokens_total prefill": 13,
        "weft:step_tokens_total decode": 14, "weft:step_tokens_total padding": 16,
        "weft:graph_profile_info NONE none": 1, "weft:open_completions": 19, "weft:weight_version": 24,
    }  # fmt: skip
    assert values(_images(STATS, MODEL)) == {
        "weft:encoder_queries_total": 21, "weft:encoder_hits_total": 22, "weft:encoder_seconds_total": 0.5,
        "weft:encoder_cache_tokens": 23,
    }  # fmt: skip
    for fields in ({"unhealthy_reason": "frozen"}, {"is_restarting": True}):
        assert collected(service_of(config, STATS, **fields))["weft:engine_up"] == 0
    assert set(collected(service_of(config, STATS, open_engine=None))) == {
        "weft:engine_up",
        "weft:engine_restarts_total",
    }


def test_figures_that_only_some_engines_have(config: EngineConfig) -> None:
    plain = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    drafting = SimpleNamespace(**plain | {"speculative_config": object(), "graph_profile": "/folder/p.json"})
    seeing = SimpleNamespace(**plain | {"model_config": SimpleNamespace(runs_vision=True)})
    usual = collected(service_of(config, STATS))
    found = collected(service_of(drafting, STATS))
    assert {name for name in found if name not in usual} == {"weft:graph_profile_info NONE p.json"} | {
        f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    found = collected(service_of(seeing, STATS))
    assert {name for name in found if name not in usual} == set(values(_images(STATS, MODEL)))
    fresh = collected(service_of(config, EngineStats()))  # nothing is reported before the first step
    assert fresh["weft:kv_pages_free"] == 100 and fresh["weft:state_slots_free"] == 20
    assert fresh["vllm:kv_cache_usage_perc"] == 0


def test_figures_of_replicas(config: EngineConfig) -> None:
    names = [name for name in ReplicaView.__struct_fields__ if name.startswith("num_")]
    views = [
        ReplicaView(replica=r, state=state, pid=r, max_num_seqs=4, **{name: 10 * r + i for i, name in enumerate(names)})
        for r, state in ((0, "up"), (1, "draining"))
    ]
    found = collected(service_of(config, STATS, engine_client=SimpleNamespace(replicas=views)))
    assert {name.removeprefix("weft:replica_"): value for name, value in found.items() if "replica_" in name} == {
        "up 0": 1, "up 1": 0,
        **{f"{name.removeprefix('num_')} {r}": 10 * r + i for r in (0, 1) for i, name in enumerate(names)},
    }  # fmt: skip


def test_the_load_is_that_of_server_and_engine(config: EngineConfig) -> None:
    context: Any = SimpleNamespace(service=service_of(config, STATS))
    assert utility.load(context) == {"server_load": 19, "num_running": 8, "num_waiting": 7, "limit": 44}
