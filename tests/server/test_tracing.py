"""Spans: contents, parents, and delivery to a collector over HTTP."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.patience import stretched
from tests.server.fake_engine import NAN
from tests.server.running import RunningServer, chat_body
from tests.server.test_async_engine import Link
from tests.whole import takes_long
from weft import __version__
from weft.config import resolve
from weft.engine.async_engine import AsyncEngine
from weft.engine.input_processor import InputProcessor
from weft.errors import ConfigError
from weft.sampling_params import SamplingParams
from weft.server.client import TraceParent
from weft.server.main import serve
from weft.server.settings import ServerSettings
from weft.server.tracing import Tracer
from weft.text.tokenizer import Tokenizer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def inputs() -> InputProcessor:
    config = resolve(device="cpu")
    return InputProcessor(config, Tokenizer.load(config.tokenizer_path), 4096)


def spans_of(
    inputs: InputProcessor, params: SamplingParams, parent: TraceParent | None = None, steps: int = 100, **given: Any
) -> list[ReadableSpan]:
    """The spans of one call after so many steps, children first."""
    memory = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(memory))

    async def main() -> None:
        link = Link()
        link.engine = AsyncEngine(link, inputs, inputs._tokenizer)
        stream = link.engine.submit("chatcmpl-1", [inputs.prepare_prompt("a b c")], params, **given)
        link.run(steps)
        tracer.ended("chat", "mini", "chatcmpl-1", params, stream, parent)

    asyncio.run(main())
    tracer.close()
    return list(memory.get_finished_spans())


def test_a_span_says_what_was_asked_and_answered_and_where_the_time_went(inputs: InputProcessor) -> None:
    now = time.time_ns()
    *phases, call = spans_of(inputs, SamplingParams(temperature=0.5, top_k=7, max_tokens=2, n=2))
    assert call.name == "chat mini" and call.kind.name == "SERVER" and call.parent is None and call.status.is_unset
    said = dict(call.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "weft", "gen_ai.request.model": "mini",
        "gen_ai.response.model": "mini", "gen_ai.response.id": "chatcmpl-1", "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7, "gen_ai.request.max_tokens": 2, "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": len(inputs.prepare_prompt("a b c").token_ids), "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0, "gen_ai.response.finish_reasons": ("length", "length"),
    }  # fmt: skip
    assert {name: said.get(name) for name in expected} == expected
    assert "gen_ai.request.top_p" not in said and "a b c" not in str(said)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    for span in phases:
        assert span.parent is not None and span.parent.span_id == call.context.span_id
    moments = [t for span in phases for t in (span.start_time, span.end_time)]
    assert call.start_time == moments[0] and moments == sorted(moments) and moments[-1] <= (call.end_time or 0)
    assert now <= (call.start_time or 0) <= now + 10e9
    total = sum(v for name, v in said.items() if name.startswith("gen_ai.latency.time_in_"))  # type: ignore[misc]
    assert total == pytest.approx(said["gen_ai.latency.e2e"])


def test_what_was_asked_is_told_as_asked(inputs: InputProcessor) -> None:
    params = SamplingParams(
        temperature=0.0, top_p=0.75, top_k=3, frequency_penalty=0.25, presence_penalty=0.5, seed=11, max_tokens=2
    )
    *_, call = spans_of(inputs, params)
    said = {name.removeprefix("gen_ai.request."): value for name, value in (call.attributes or {}).items()}
    asked = {"temperature": 0.0, "top_p": 0.75, "top_k": 3, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    assert {name: said.get(name) for name in asked} == asked and said["seed"] == 11 and "choice.count" not in said
    assert call.resource.attributes["service.name"] == "weft"
    assert call.resource.attributes["service.version"] == __version__


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", "http:///v1/traces", ""])
def test_an_endpoint_that_is_no_collectors(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a collector"):
        Tracer.towards(endpoint)


def test_the_parent_is_followed_also_in_what_it_samples(inputs: InputProcessor) -> None:
    *_, call = spans_of(inputs, SamplingParams(max_tokens=1), TraceParent(TRACE, SPAN, 1))
    assert f"{call.context.trace_id:032x}" == TRACE and call.parent is not None
    assert f"{call.parent.span_id:016x}" == SPAN and call.parent.is_remote
    assert spans_of(inputs, SamplingParams(max_tokens=1), TraceParent(TRACE, SPAN, 0)) == []


def test_calls_that_break_or_are_left_early(inputs: InputProcessor) -> None:
    *_, broken = spans_of(inputs, SamplingParams(max_tokens=3), priority=NAN)
    assert not broken.status.is_ok and (broken.attributes or {})["error.type"] == "model_error"
    queue, left = spans_of(inputs, SamplingParams(max_tokens=3), steps=0)
    assert queue.name == "queue" and (left.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP collector: its address, and the spans that it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") is None and self.path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", spans
    http.shutdown()


def test_spans_reach_a_collector_at_the_latest_when_the_server_ends(collector: tuple[str, list[Any]]) -> None:
    address, spans = collector
    server = RunningServer("--otlp-traces-endpoint", address).wait_ready()
    try:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        server.client.post("/v1/chat/completions", json=chat_body("x", stream=True), headers=headers)
        server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        server.client.post("/v1/messages", json=chat_body("x", max_tokens=2))
        assert server.stop() == 0
    finally:
        server.close()
    calls = {span.name: span for span in spans if span.kind == 2}  # SERVER
    assert set(calls) == {"chat weft-mini", "text_completion weft-mini"} and len(spans) == 12
    assert sum(span.trace_id.hex() == TRACE for span in spans) == 4


@takes_long
def test_a_collector_that_is_not_there_delays_nobody() -> None:
    server = RunningServer("--otlp-traces-endpoint", "http://127.0.0.1:9").wait_ready()
    try:
        assert server.chat("x").status_code == 200
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < stretched(5)
    finally:
        server.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="URL"):
        serve(ServerSettings(otlp_traces_endpoint="localhost:4318"), {})
    monkeypatch.delitem(sys.modules, "weft.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"opentelemetry.*pip install 'weft\[otel\]'"):
        serve(ServerSettings(otlp_traces_endpoint="http://localhost:4318"), {})
