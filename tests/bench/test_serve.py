"""The load generator: its workloads, its figures, and a run against a real server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer
from weft.bench.http_client import Target
from weft.bench.serve import Outcome, ServeWorkload, _body, conversations, measure, summary
from weft.bench.serve_plot import panel
from weft.cli import bench_serve, main
from weft.errors import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer()
    try:
        yield running.wait_ready()
    finally:
        running.close()


def test_workloads_are_what_they_say_and_the_same_for_a_seed() -> None:
    fixed = conversations(ServeWorkload(kind="fixed", num_requests=5, input_words=(2, 7)))
    assert [[len(question.split()) for question in c.questions] for c in fixed] == [[7]] * 5
    assert {c.start_s for c in fixed} == {0.0}
    workload = ServeWorkload(num_requests=200, input_words=(2, 7), request_rate=10.0)
    loads = conversations(workload)
    assert loads == conversations(workload)
    assert {len(c.questions[0].split()) for c in loads} == set(range(2, 8))
    assert loads[-1].start_s == pytest.approx(20, rel=0.3)
    assert all(len(c.questions) == 3 for c in conversations(ServeWorkload(kind="multi-turn", num_requests=2, turns=3)))


def test_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 7.5, "prompt": "a"}\n\n{"timestamp": 8, "prompt": "b", "max_tokens": 3}\n')
    loads = conversations(ServeWorkload(kind="trace", trace=str(file)))
    assert [(c.start_s, c.questions, c.max_tokens) for c in loads] == [(0.0, ["a"], 64), (0.5, ["b"], 3)]
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="timestamp"):
        conversations(ServeWorkload(kind="trace", trace=str(file)))


def test_figures() -> None:
    outcomes = [Outcome(ttft_s=0.1 * i, e2e_s=0.1 * i + 0.9, output_tokens=10, prompt_tokens=5) for i in range(1, 11)]
    outcomes.append(Outcome(error="HTTP 429"))
    figures = summary(outcomes, 2.0, {"ttft": 500, "tpot": 101})
    assert (figures["requests"], figures["failed"], figures["errors"]) == (11, 1, ["HTTP 429"])
    assert (figures["requests_per_s"], figures["output_tokens_per_s"], figures["goodput_per_s"]) == (5.0, 50.0, 2.5)
    assert (figures["ttft_ms"]["p50"], figures["ttft_ms"]["p99"], figures["tpot_ms"]["mean"]) == (500.0, 1000.0, 100.0)
    assert (figures["ttft_ms"]["p90"], figures["ttft_ms"]["p95"], figures["e2e_ms"]["max"]) == (900.0, 1000.0, 1900.0)
    assert (figures["seconds"], figures["prompt_tokens_per_s"], figures["itl_ms"]) == (2.0, 25.0, None)
    for limit, goodput in ({"e2e": 1250}, 1.5), ({"tpot": 99}, 0), ({}, None):
        assert summary(outcomes, 2.0, limit)["goodput_per_s"] == goodput  # type: ignore[arg-type]
    assert summary([], 1.0, {})["itl_ms"] is None


@pytest.mark.parametrize("kind", ["random", "multi-turn"])
def test_a_run(server: RunningServer, kind: str) -> None:
    workload = ServeWorkload(kind=kind, num_requests=6, concurrency=3, input_words=(2, 5), max_tokens=8, turns=2)
    figures = measure(Target.parse(f"{server.url}/v1"), "weft-mini", workload)
    assert figures["failed"] == 0, figures["errors"]
    assert figures["requests"] == (12 if kind == "multi-turn" else 6)
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(8 * figures["requests"], rel=0.05)
    assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["max"]


def test_the_verb(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    flags = ["--num-requests", "4", "--concurrency", "1", "0", "--input-words", "2", "3", "--slo", "ttft=10000"]
    assert main(["bench", "serve", "--base-url", f"{server.url}/v1", *flags, "--json", str(file)]) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [run["workload"]["seed"] for run in runs] == [0, 1], "the second run would find the first's prompts cached"
    assert [run["workload"]["concurrency"] for run in runs] == [1, None] and runs[0]["results"]["goodput_per_s"] > 0
    assert "Load on" in capsys.readouterr().out


def test_every_flag_reaches_the_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[tuple[Target, str | None, ServeWorkload]] = []

    def measure(*given: Any) -> dict[str, Any]:
        measured.append(given)
        return summary([], 1.0, {})

    monkeypatch.setattr("weft.bench.serve.measure", measure)
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    words = "--base-url https://host:5/v1 --model m --kind multi-turn --num-requests 3 --request-rate 2 4 "
    words += "--concurrency 6 --input-words 7 8 --max-tokens 9 --turns 10 --no-ignore-eos --temperature 0.5 --seed 11 "
    words += '--slo ttft=12 e2e=13 --extra-body {"top_k":5}'
    assert main(["bench", "serve", *words.split(), "--key", "k"]) == 0
    wanted = ServeWorkload(
        "multi-turn", 3, 2.0, 6, (7, 8), 9, 10, None, False, 0.5, 11, {"ttft": 12, "e2e": 13}, {"top_k": 5}
    )
    target = Target("host", 5, "/v1", True, "k")
    second = replace(wanted, request_rate=4.0, seed=12)
    assert measured == [(target, "m", wanted), (target, "m", second)]
    assert main(["bench", "serve", "--kind", "trace", "--trace", "FILE"]) == 0
    target = Target("127.0.0.1", 8000, "/v1", False, "of the environment")
    assert measured[2:] == [(target, None, ServeWorkload(kind="trace", trace="FILE"))]
    capsys.readouterr()
    assert main(["bench", "serve", "--kind", "trace", "--trace", "FILE", "--request-rate", "2"]) == 2
    assert len(measured) == 3 and "--request-rate has no effect with a trace" in capsys.readouterr().err
    assert b"\r\nAuthorization: Bearer of the environment\r\n" in target.head("/x", 3)
    assert target.head("/x", 3).startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")


def test_a_request_is_what_the_load_says() -> None:
    messages = [{"role": "user", "content": "x"}]
    plain = {"messages": messages, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    workload = ServeWorkload(max_tokens=9, ignore_eos=False, temperature=0.5)
    assert json.loads(_body(None, messages, 3, workload)) == plain | {"temperature": 0.5}
    workload = ServeWorkload(extra_body={"top_k": 5, "temperature": 1})
    more = {"model": "m", "ignore_eos": True, "top_k": 5, "temperature": 1}
    assert json.loads(_body("m", messages, 3, workload)) == plain | more


def test_a_sweep_of_rates_and_its_picture(server: RunningServer, tmp_path: Path) -> None:
    json_file, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    flags = ["--num-requests", "6", "--max-tokens", "3", "--slo", "ttft=10000"]
    flags += ["--request-rate", "200", "100", "--json", str(json_file), "--plot", str(plot)]
    assert main(["bench", "serve", "--base-url", f"{server.url}/v1", *flags]) == 0
    workloads = [run["workload"] for run in json.loads(json_file.read_text())["runs"]]
    assert [(w["request_rate"], w["concurrency"]) for w in workloads] == [(200, None), (100, None)]
    root = ElementTree.parse(plot).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"time to first token, ms", "p50", "p99", "within the SLO", "conversations sent per second"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 8


def test_points_stand_where_their_values_are() -> None:
    drawn = ElementTree.fromstring(f"<g>{panel('t', 'x', [1, 2, 4], {'a': [10, None, 40]})}</g>")
    line = drawn.find("polyline")
    assert line is not None
    first, last = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    base = max(float(grid.attrib["y1"]) for grid in drawn.iter("line"))
    assert last[0] - 62 == pytest.approx(4 * (first[0] - 62), abs=1)
    assert base - last[1] == pytest.approx(4 * (base - first[1]), abs=1)


@pytest.mark.parametrize(
    "flags",
    [
        ["--base-url", "ftp://x"],
        ["--plot", "/proc/nowhere/plot.svg"],
        ["--request-rate", "5", "-1"],
        ["--slo", "x=1"],
        ["--kind", "trace"],
        ["--input-words", "3", "2"],
        ["--request-rate", "0"],
        ["--extra-body", "[]"],
        ["--extra-body", "{"],
        ["--trace", "FILE"],
        ["--num-requests", "0"],
        ["--max-tokens", "0"],
        ["--turns", "0"],
    ],
)
def test_bad_flags(flags: list[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2


class _OtherServer(BaseHTTPRequestHandler):
    """Names the role at once, thinks, sends two tokens and an empty end, tells no usage, ends lines as in HTTP, and
    closes each connection behind its answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunks = [{"role": "assistant", "content": ""}, {"reasoning_content": "a"}, {"content": "b"}, {"content": ""}]
        events = [b"data: " + json.dumps({"choices": [{"delta": chunk}]}).encode() + b"\r\n\r\n" for chunk in chunks]
        events.append(b"data: [DONE]\r\n\r\n")
        self.send_response(200)
        self.send_header("Content-Length", str(sum(map(len, events))))
        self.end_headers()
        self.wfile.write(events[0])
        time.sleep(0.1)
        self.wfile.write(b"".join(events[1:]))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("version", "rate"), [("HTTP/1.0", None), ("HTTP/1.1", 3.0)])
def test_only_what_was_generated_counts(version: str, rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no connection is used again that the server closes at once, or has closed while it was idle, as it is until
    the second request comes, after 0.8 s."""
    monkeypatch.setattr(_OtherServer, "protocol_version", version)
    with HTTPServer(("127.0.0.1", 0), _OtherServer) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        workload = ServeWorkload(num_requests=2, concurrency=1, request_rate=rate, input_words=(2, 2), seed=3)
        figures = measure(Target.parse(f"http://127.0.0.1:{server.server_port}/v1"), None, workload)
        server.shutdown()
    assert figures["failed"] == 0 and figures["ttft_ms"]["p50"] >= 100
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(2 * 2, rel=0.05)


def test_a_conversation_goes_on_with_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[dict[str, str]]] = []
    asking = most = 0

    async def ask(client: Any, path: str, body: bytes, *_: Any) -> Outcome:
        nonlocal asking, most
        sent.append(json.loads(body)["messages"])
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0)
        asking -= 1
        return Outcome(text=f"answer {len(sent)}", output_tokens=1)

    monkeypatch.setattr("weft.bench.serve.ask", ask)
    for concurrency, limit in ((1, 1), (2, 2), (None, 3)):
        sent, most = [], 0
        workload = ServeWorkload(kind="multi-turn", num_requests=3, concurrency=concurrency, turns=2)
        assert measure(Target.parse("http://x/v1"), None, workload)["requests"] == 6 and most == limit
        if concurrency == 1:
            first, second = sent[:2]
            assert [m["role"] for m in second] == ["user", "assistant", "user"] and second[:1] == first
            assert (
                second[1]["content"] == "answer 1" and second[2]["content"] == conversations(workload)[0].questions[1]
            )


def test_conversations_begin_when_they_are_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(client: Any, path: str, body: bytes, *_: Any) -> Outcome:
        return Outcome(output_tokens=1)

    monkeypatch.setattr("weft.bench.serve.ask", ask)
    workload = ServeWorkload(num_requests=4, request_rate=30.0, concurrency=None)
    assert measure(Target.parse("http://x/v1"), None, workload)["seconds"] >= conversations(workload)[-1].start_s > 0.01


def test_every_figure_stands_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    latencies = {name: {"p50": i + 0.5, "p99": i + 50.5} for i, name in enumerate(names, start=1)}
    results = {"requests_per_s": 11.0, "output_tokens_per_s": 12.0, "goodput_per_s": 13.0, "failed": 14, "errors": []}
    bare = dict.fromkeys(names) | {"goodput_per_s": None, "errors": ["no tokens"]}
    bench_serve._print("http://x", [
        {"workload": {"request_rate": 9.0, "concurrency": 10}, "results": results | latencies},
        {"workload": {"request_rate": None, "concurrency": None}, "results": results | bare},
    ])  # fmt: skip
    out = capsys.readouterr().out
    heads, *rows = [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        for line in out.splitlines()
        if "req" in line or "10" in line or "no limit" in line
    ]
    shown = [dict(zip(heads, row, strict=True)) for row in rows]
    assert shown[0] == {
        "rate": "9/s", "concurrency": "10", "requests/s": "11.0", "output tok/s": "12", "goodput/s": "13.0",
        "failed": "14", "TTFT p50 p99": "1.5 51.5 ms", "TPOT p50 p99": "2.5 52.5 ms", "ITL p50 p99": "3.5 53.5 ms",
        "E2E p50 p99": "4.5 54.5 ms",
    }  # fmt: skip
    assert (shown[1]["rate"], shown[1]["concurrency"], shown[1]["goodput/s"], shown[1]["ITL p50 p99"]) == (
        "", "no limit", "", "",
    )  # fmt: skip
    assert "error: no tokens" in out


def test_a_server_that_is_not_there() -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9/v1", "--num-requests", "1"]) == 1
