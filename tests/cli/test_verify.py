"""``weft verify`` on the emulator: a table and status 0 where graphs are right, status 1 and the sizes where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import RunWeft
from weft.graph.graph import Tape

FLAGS = ["--device", "cpu", "--cuda-graph-mode", "FULL_DECODE_ONLY", "--cuda-graph-bs", 1, 3, "--max-num-seqs", 3]
SMALL = ["--cpu-cache-gib", 0.1, "--max-model-len", 200]


def test_graphs_agree(run_weft: RunWeft, tmp_path: Path) -> None:
    result = run_weft("verify", *FLAGS, *SMALL, "--json", tmp_path / "verify.json")
    assert result.status == 0 and "agrees" in result.out
    figures = json.loads((tmp_path / "verify.json").read_text())
    assert figures["failed"] == [] and [row["size"] for row in figures["results"]] == [1, 3]
    assert all(row["max_abs_diff"] == 0 and row["num_different_tokens"] == 0 for row in figures["results"])


def test_graphs_that_disagree_fail(run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "replay", lambda self: None)
    result = run_weft("verify", *FLAGS, *SMALL)
    assert result.status == 1 and "2 graphs do not agree with eager steps: decode 1, decode 3" in result.out


def test_batches_follow_from_the_seed(run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("weft.bench.graph_check.verify_graphs", lambda runner, seed: [seen.append(seed)][1:])
    assert run_weft("verify", *FLAGS, *SMALL, "--seed", 7).status == 0 and seen == [7]


def test_without_graphs_there_is_nothing_to_verify(run_weft: RunWeft) -> None:
    result = run_weft("verify", "--device", "cpu")
    assert result.status == 2 and "--cuda-graph-mode FULL" in result.err
    result = run_weft("verify", "--device", "cpu", "--tp", 2)
    assert result.status == 2 and "looks into a model on one rank; leave it out" in result.err
