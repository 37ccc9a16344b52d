"""The benchmark of the server alone, at a small size: every token is followed from its step to the client."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.server_load import run


def test_figures(tmp_path: Path) -> None:
    args = argparse.Namespace(connections=4, seconds=0.2, repeats=1, tokens=25)
    figures = run(args, tmp_path / "steps.json")
    (rate,), delays = figures["throughput"], figures["latency"]
    assert rate["chats"] >= 40 and rate["chats_per_s"] > 20 and 2 <= rate["events_per_chat"] <= 17
    assert set(rate["processor_us_per_chat"]) == {"server", "engine", "client"}
    assert delays["tokens"] == 4 * 25 and delays["chunks"] <= delays["tokens"]
    assert 0 < delays["added_ms"]["p50"] <= delays["added_ms"]["p99"] <= delays["added_ms"]["max"] < 2000
    assert 0 < delays["health_ms"]["p50"] < 1000
