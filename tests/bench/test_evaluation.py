"""Scoring of the word problems, with a stub in place of the engine, and the verb with the real one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.assets import EVAL_PATH
from weft.bench.evaluation import Problem, Verdict, ask, read_problems, score
from weft.cli import main


def problem(template: str, answer: str, unseen: bool = False) -> Problem:
    return Problem(f"{template}-{answer}", template, unseen, [{"role": "user", "content": "?"}], answer)


class Parrot:
    """Answers every chat with the same text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def chat(self, messages: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.temperature == 0.0
        return [SimpleNamespace(outputs=[SimpleNamespace(text=self.text, finish_reason="stop")]) for _ in messages]


def test_all_problems_are_read() -> None:
    problems = read_problems()
    assert len(problems) == 200 == len(EVAL_PATH.read_text().splitlines())
    assert read_problems(limit=3) == problems[:3]
    assert any(p.unseen_template for p in problems) and not all(p.unseen_template for p in problems)


def test_shares() -> None:
    problems = [problem("a", "42"), problem("a", "7"), problem("b", "42", unseen=True), problem("c", "1")]
    figures = score(ask(Parrot("40 + 2\nAnswer: 42"), problems))  # type: ignore[arg-type]
    assert figures["accuracy"] == 0.5 and figures["num_right"] == 2
    assert figures["by_template"] == {"a": 0.5, "b": 1.0, "c": 0.0}
    assert figures["seen_templates"] == round(1 / 3, 4) and figures["unseen_templates"] == 1.0


def test_a_reply_without_an_answer_is_wrong() -> None:
    (verdict,) = ask(Parrot("I cannot say."), [problem("a", "42")])  # type: ignore[arg-type]
    assert verdict == Verdict(problem("a", "42"), "I cannot say.", None, "stop")
    assert not verdict.right and score([verdict])["unseen_templates"] is None


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "eval.json"
    assert main(["eval", "--limit", "3", "--dump", "--json", str(target), "--device", "cpu"]) == 0
    figures = json.loads(target.read_text())
    assert figures["num_problems"] == 3 and len(figures["replies"]) == 3
    assert figures["config"]["max_num_seqs"] == 128
    assert {"accuracy", "by_template", "unseen_templates", "device", "versions", "date", "command"} <= set(figures)
    out = capsys.readouterr().out
    assert out.count("--- eval-") == 3 and "accuracy" in out


def test_bad_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--limit", "0"]) == 2
    assert "--limit 0" in capsys.readouterr().err
