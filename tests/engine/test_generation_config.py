"""Settings in ``generation_config.json`` apply to every request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from weft import LLM, SamplingParams, StructuredOutputsParams
from weft.cli import main

PROMPT = [5, 6, 7]


@pytest.fixture
def checkpoint(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "checkpoint"))


def generate(checkpoint: Path, generation: dict[str, Any], **params: Any) -> Any:
    (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    with LLM(str(checkpoint), num_kv_pages=20, max_num_seqs=2) as llm:
        return llm.generate(PROMPT, SamplingParams(**{"temperature": 0.0} | params), use_tqdm=False)[0].outputs[0]


def test_an_eos_id_beyond_the_vocabulary(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = generate(checkpoint, {"eos_token_id": [2, 9999]}, min_tokens=2, max_tokens=4)
    assert output.finish_reason in ("length", "stop") and len(output.token_ids) >= 2
    assert main(["config", "--model", str(checkpoint), "--device", "cpu"]) == 0
    assert "9999: the vocabulary has 320 ids" in " ".join(capsys.readouterr().out.split())


def test_the_eos_of_the_tokenizer_ends_a_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Id 2, where the checkpoint names id 0 alone."""
    always: dict[str, Any] = {"logit_bias": {2: 100}, "max_tokens": 6}
    ended = generate(checkpoint, {"eos_token_id": 0}, **always)
    assert (ended.finish_reason, ended.stop_reason, list(ended.token_ids), ended.text) == ("stop", None, [2], "")
    late = generate(checkpoint, {"eos_token_id": 0}, min_tokens=3, **always)
    assert late.finish_reason == "stop" and list(late.token_ids).index(2) == len(late.token_ids) - 1 == 3
    ignored = generate(checkpoint, {"eos_token_id": 0}, ignore_eos=True, **always)
    assert (ignored.finish_reason, list(ignored.token_ids)) == ("length", [2] * 6)
    constraint = StructuredOutputsParams(choice=["yes"])
    chosen = generate(checkpoint, {"eos_token_id": 0}, structured_outputs=constraint, **always)
    assert (chosen.finish_reason, chosen.text, chosen.token_ids[-1]) == ("stop", "yes", 2)
    assert main(["config", "--model", str(checkpoint), "--device", "cpu"]) == 0
    assert "EOS ids │ 0 2" in " ".join(capsys.readouterr().out.split())


def test_suppressed_tokens_are_never_sampled(checkpoint: Path) -> None:
    first = generate(checkpoint, {}, max_tokens=1).token_ids[0]
    suppressed = generate(checkpoint, {"suppress_tokens": [first, 9999]}, max_tokens=6, ignore_eos=True)
    assert first not in suppressed.token_ids
    assert generate(checkpoint, {"suppress_tokens": [first]}, max_tokens=1, bad_words=["zz"]).token_ids != [first]


def test_min_p_has_a_default(checkpoint: Path) -> None:
    """1.0 leaves the likeliest token alone."""
    drawn = generate(checkpoint, {"min_p": 1.0}, temperature=5.0, seed=0, max_tokens=8, ignore_eos=True)
    assert drawn.token_ids == generate(checkpoint, {}, max_tokens=8, ignore_eos=True).token_ids


def test_max_new_tokens_is_the_default_of_max_tokens(checkpoint: Path) -> None:
    generation = {"max_new_tokens": 5}
    assert len(generate(checkpoint, generation, ignore_eos=True).token_ids) == 5
    assert len(generate(checkpoint, generation, ignore_eos=True, max_tokens=7).token_ids) == 7
    assert len(generate(checkpoint, generation, ignore_eos=True, min_tokens=6).token_ids) == 6


def test_what_is_not_used_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"no_repeat_ngram_size": 3}))
    assert main(["config", "--model", str(checkpoint), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "generation: not_used" in shown and "no_repeat_ngram_size=3" in shown
