"""The comparison of fixed modes with the tuned mode: the definition of a loss, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tuned_choice import FIXED, TUNED, judge, main, verdict
from tests.whole import takes_long

RAN = {str(mode): str(mode) for mode in FIXED} | {TUNED: "NONE"}


def row(tuned: float, best: list[float]) -> bool:
    times = {"NONE": best, "PIECEWISE": [9.0] * 3, "FULL": [9.0] * 3, TUNED: [tuned] * 3}
    return bool(judge("prefill", 16, times, RAN)["holds"])


def test_candidates_that_ran_in_one_mode_are_one() -> None:
    """Without a graph of that size all three run the same, and the least of their medians is an accident."""
    times = {"NONE": [1.0, 1.2], "PIECEWISE": [0.9, 1.1], "FULL": [1.0, 1.4], TUNED: [1.05] * 2}
    found = judge("prefill", 16, times, dict.fromkeys(RAN, "NONE"))
    assert (found["best"], found["chosen"], found["best_ms"]) == ("NONE", "NONE", 1.05) and found["excess"] == 0.0
    assert judge("prefill", 16, times, RAN)["best_ms"] == 1.0


def test_what_counts_as_a_loss() -> None:
    assert row(1.029, [1.0] * 5) and not row(1.031, [1.0] * 5)
    assert row(1.04, [0.9, 0.95, 1.0, 1.05, 1.1]), "where the rounds scatter more, that much is allowed"
    assert row(0.5, [1.0] * 5)


def test_a_comparison_that_could_not_fail_is_no_success() -> None:
    rows = [{"kind": "prefill", "tokens": n, "best": best, "holds": True} for n, best in ((16, "FULL"), (600, "NONE"))]
    assert verdict(rows)[0] == 0
    assert verdict(rows[:1])[0] == 1 and "no choice was tested" in verdict(rows[:1])[1]
    rows[1]["holds"] = False
    assert verdict(rows)[0] == 1 and "allowed: prefill of 600." in verdict(rows)[1]


@takes_long
def test_every_mode_at_every_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "choice.json"
    sizes = ["--lengths", "7", "16", "99", "--batches", "1", "2", "9", "--piecewise-cuda-graph-tokens", "8", "16"]
    small = ["--device", "cpu", "--max-num-seqs", "2", "--max-num-batched-tokens", "30", "--cpu-cache-gib", "0.05"]
    status = main([*sizes, *small, "--max-model-len", "99", "--repeats", "2", "--context", "3", "--json", str(path)])
    figures = json.loads(path.read_text())
    rows = figures["results"]
    assert [(r["kind"], r["tokens"]) for r in rows] == [
        ("decode", 2), ("decode", 1), ("mixed", 7), ("mixed", 16), ("prefill", 7), ("prefill", 16),
    ]  # fmt: skip
    for r in rows:
        assert set(r["ms"]) == {*map(str, FIXED), TUNED} and all(len(v) == 2 for v in r["repeats_ms"].values())
        assert {r["best"], r["chosen"]} <= {*map(str, FIXED)}
    differs = len({r["best"] for r in rows}) > 1
    assert status == (0 if differs and all(r["holds"] for r in rows) else 1)
    assert figures["profile"]["prefill"] and "Slower than the best fixed mode" in capsys.readouterr().out
