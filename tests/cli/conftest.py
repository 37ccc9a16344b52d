"""One engine for all command-line tests that do not test how it is made.

``run_weft`` runs the command line in this process; the verbs get the shared engine in place of their own, and the
settings that they asked for are recorded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.engine.llm import LLM


@dataclass
class Result:
    status: int
    out: str
    err: str
    settings: dict[str, Any]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


RunWeft = Callable[..., Result]


@pytest.fixture(scope="session")
def engine() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=16, cpu_cache_gib=0.1) as llm:
        yield llm


@pytest.fixture
def run_weft(engine: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunWeft:
    settings: dict[str, Any] = {}

    def make(**given: Any) -> LLM:
        settings.update(given)
        return engine

    monkeypatch.setattr("weft.engine.llm.LLM", make)
    monkeypatch.setattr(LLM, "shutdown", lambda self: None)

    def run(*argv: str | Path, stdin: str = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status = main([str(word) for word in argv])
        captured = capsys.readouterr()
        assert engine.is_finished(), "a verb left requests open"
        return Result(status, captured.out, captured.err, settings)

    return run
