"""The benchmark of the server alone, at a small size: every token is followed from its step to the client."""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_load import run
from tests.patience import GUARD_S, stretched
from tests.server.fake_engine import SLOW
from tests.server.running import RunningServer, chat_body
from tests.whole import takes_long


@takes_long  # of a benchmark
def test_figures(tmp_path: Path) -> None:
    args = argparse.Namespace(api_server_count=1, connections=4, seconds=0.2, repeats=1, tokens=25)
    figures = run(args, tmp_path / "steps.json")
    (rate,), delays = figures["throughput"], figures["latency"]
    assert rate["chats"] >= 40 and rate["chats_per_s"] > 20 and 2 <= rate["events_per_chat"] <= 17
    assert set(rate["processor_us_per_chat"]) == {"server", "engine", "client"}
    assert delays["tokens"] == 4 * 25 and delays["chunks"] <= delays["tokens"]
    assert 0 < delays["added_ms"]["p50"] <= delays["added_ms"]["p99"] <= delays["added_ms"]["max"] < 2000
    assert 0 < delays["health_ms"]["p50"] < 1000


@takes_long
def test_no_stream_waits_for_what_others_send(server: RunningServer) -> None:
    """On an idle machine no gap is above 0.1 s; the bound leaves room for a busy one, and the whole prompt takes 20."""
    words = "one two three " * 500_000
    heavy: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", chat_body(words), 400),
        ("/v1/completions", {"prompt": words}, 400),
        ("/v1/completions", {"prompt": "x", "bad_words": [f"w{i}" for i in range(100_000)]}, 400),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [5] * 1_000_000}, 400),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(400_000)}}, 400),
        ("/tokenize", {"prompt": words[: 1 << 20]}, 200),
    ]
    contents = [(path, json.dumps(body).encode(), status) for path, body, status in heavy]
    gaps, done = [], threading.Event()

    def read() -> None:
        body = chat_body("on and on", stream=True, priority=SLOW, ignore_eos=True)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=GUARD_S) as response:
            last = time.monotonic()
            for _ in response.iter_lines():
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                if done.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for path, content, status in contents:
            answer = server.client.post(path, content=content, timeout=GUARD_S)
            assert answer.status_code == status, answer.text[:300]
    finally:
        done.set()
        reader.join()
    assert len(gaps) > 20 and max(gaps[1:]) < stretched(3)
