"""``weft inspect``: each request's cache report in words, and the tree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunWeft
from weft import LLM, RequestOutput, SamplingParams
from weft.cli import main


def reports(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.startswith("    KV matched")]


def test_built_in_workload_shows_a_branch_and_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--dump", "--device", "cpu", "--cpu-cache-gib", "0.1", "--max-num-seqs", "2"]) == 0
    out = capsys.readouterr().out
    first, branch, hit, again, following = reports(out)
    assert first.endswith("nothing is stored")
    assert "no state was ever stored between 0 and 25; the prompt leaves everything stored at 25" in branch
    assert "nearest state at 25, recomputed 0: the prompt leaves everything stored at 25" in hit
    assert again.endswith("recomputed 1")
    # How long the first answer is, the model says.
    assert re.search(r"nearest state at (\d\d), recomputed 0: nothing beyond \1 was ever stored", following)
    tree = out.splitlines()
    assert "root" in tree and "  [0, 25) 2 pages, states 25, used 0 admissions ago" in tree
    assert re.match(r"reused \d+ of \d+ tokens; pages: ", tree[-1])


def test_prompts_of_ones_own(run_weft: RunWeft, tmp_path: Path) -> None:
    text = "The same words come twice, and then they come once more."
    result = run_weft("inspect", text, text, "--max-tokens", 3)
    assert result.status == 0 and reports(result.out)[1].endswith("recomputed 1")
    assert "root" not in result.out.splitlines(), "the tree was not asked for"
    file = tmp_path / "jobs.jsonl"
    file.write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for ids in ([5] * 20, [5] * 15 + [6] * 5)))
    result = run_weft("inspect", "--input", file, "--dump")
    assert "20 token ids" in result.out and "the prompt leaves everything stored at 15" in reports(result.out)[1]


def test_lines_have_parameters_of_their_own(run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    generate = LLM.generate

    def noted(self: LLM, prompts: Any, params: SamplingParams, **more: Any) -> list[RequestOutput]:
        seen.append(params.max_tokens)
        return generate(self, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", noted)
    lines = '{"prompt": "1", "max_tokens": 2}\n{"prompt": "2"}\n'
    assert run_weft("inspect", "--input", "-", "--max-tokens", 3, stdin=lines).status == 0
    assert seen == [2, 3]


def test_bad_input_is_named(run_weft: RunWeft, tmp_path: Path) -> None:
    result = run_weft("inspect", "--no-enable-prefix-caching")
    assert result.status == 2 and "nothing to inspect with --no-enable-prefix-caching" in result.err
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompts": "b"}\n')
    result = run_weft("inspect", "--input", file)
    assert result.status == 2 and "line 2: unknown keys prompts" in result.err
