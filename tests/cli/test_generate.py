"""``weft generate``: arguments, stdin, files of JSON lines, and lines that fail alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunWeft
from weft.engine.llm import LLM
from weft.sampling_params import SamplingParams


def text_of(engine: LLM, prompt: str, max_tokens: int) -> str:
    (output,) = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return output.outputs[0].text


def test_one_prompt_streams_its_text(run_weft: RunWeft, engine: LLM) -> None:
    result = run_weft("generate", "12 + 30:", "--max-tokens", 8, "--temperature", 0)
    assert result.status == 0
    assert result.out == text_of(engine, "12 + 30:", 8) + "\n"
    assert "8 tokens" in result.err and "from the cache" in result.err


def test_priorities_of_lines_reach_the_engine(run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    add = LLM.add_request

    def noted(self: LLM, *args: Any, priority: int = 0, **more: Any) -> str:
        seen.append(priority)
        return add(self, *args, priority=priority, **more)

    monkeypatch.setattr(LLM, "add_request", noted)
    lines = '{"prompt": "1", "priority": 3}\n{"prompt": "2"}\n'
    assert run_weft("generate", "--input", "-", "--max-tokens", 1, stdin=lines).status == 0
    assert seen == [3, 0]


def test_tools_and_variables_of_a_line_reach_its_template(run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    render = LLM.render_chat

    def noted(self: LLM, *args: Any) -> dict[str, Any]:
        seen.append(args)
        return render(self, *args)

    monkeypatch.setattr(LLM, "render_chat", noted)
    line = {
        "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }  # fmt: skip
    for verb in ("generate", "inspect"):
        assert run_weft(verb, "--input", "-", "--max-tokens", 1, stdin=json.dumps(line)).status == 0
    assert seen == [(line["messages"], line["tools"], line["chat_template_kwargs"])] * 2


def test_prompt_from_stdin(run_weft: RunWeft, engine: LLM) -> None:
    result = run_weft("generate", "-", "--max-tokens", 5, "--temperature", 0, "--quiet", stdin="12 + 30:")
    assert result.out == text_of(engine, "12 + 30:", 5) + "\n"
    assert result.err == ""


def test_several_prompts_show_what_was_asked(run_weft: RunWeft, engine: LLM) -> None:
    result = run_weft("generate", "12 +", "7 -", "--max-tokens", 3, "--temperature", 0)
    assert "> 12 +\n" + text_of(engine, "12 +", 3) in result.out
    assert "> 7 -\n" + text_of(engine, "7 -", 3) in result.out
    assert "of them cached; 3 generated" in result.out


def test_chat_uses_the_template(run_weft: RunWeft, engine: LLM) -> None:
    result = run_weft("generate", "--chat", "What is 2 + 2?", "--max-tokens", 4, "--output", "-")
    assert result.lines()[0]["prompt"] == engine.render_chat([{"role": "user", "content": "What is 2 + 2?"}])["prompt"]


def test_engine_flags_reach_the_engine(run_weft: RunWeft, tmp_path: Path) -> None:
    result = run_weft("generate", "a", "--max-tokens", 1, "--tp", 1, "--profile", tmp_path, "--page-size", 8)
    assert result.settings == {"tensor_parallel_size": 1, "profile_dir": str(tmp_path), "page_size": 8}


def test_file_in_and_out(run_weft: RunWeft, engine: LLM, tmp_path: Path) -> None:
    entries = [
        {"id": "é\ud800", "prompt": "12 + 30:", "max_tokens": 9, "logprobs": 2},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "n": 2, "temperature": 1.0, "seed": 1, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "Hi"}], "priority": 1},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(entry) for entry in entries))
    result = run_weft("generate", "--input", source, "--output", target, "--max-tokens", 3, "--temperature", 0)
    assert (result.status, result.out) == (0, "")
    first, second, third = (json.loads(line) for line in target.read_text("utf-8").splitlines())
    assert first["id"] == "é\ud800" and first["outputs"][0]["text"] == text_of(engine, "12 + 30:", 9)
    assert len(first["outputs"][0]["logprobs"]) == 9
    assert first["usage"]["completion_tokens"] == 9
    assert 0 <= first["usage"]["cached_tokens"] < first["usage"]["prompt_tokens"]  # as much as other tests left there
    assert (second["usage"]["prompt_tokens"], second["usage"]["completion_tokens"]) == (3, 4)
    assert [c["index"] for c in second["outputs"]] == [0, 1]
    assert third["line"] == 3 and len(third["outputs"][0]["token_ids"]) <= 3


def test_bad_lines_fail_alone(run_weft: RunWeft, engine: LLM) -> None:
    lines = [
        '{"prompt": "12 + 30:"}',
        "{not json",
        '{"prompt": ""}',
        '{"prompt_token_ids": [1, 999999]}',
        '{"prompt": "a", "temperature": -1}',
        json.dumps({"prompt_token_ids": [1] * 5000}),
        '{"messages": [{"role": "user", "content": "Hi"}], "id": 7, "bad": 1, "logits_processors": []}',
        '{"prompt": "12 + 30:"}',
    ]
    result = run_weft("generate", "--input", "-", "--max-tokens", 4, "--temperature", 0, stdin="\n".join(lines))
    assert result.status == 1
    written = result.lines()
    assert [entry["line"] for entry in written] == list(range(1, 9))
    assert written[0]["outputs"][0]["text"] == written[7]["outputs"][0]["text"] == text_of(engine, "12 + 30:", 4)
    for number, word in {
        2: "JSON",
        3: "empty",
        4: "999999",
        5: "temperature",
        6: "5000",
        7: "unknown keys bad, logits_processors; allowed: ",
    }.items():
        assert word in written[number - 1]["error"]["message"]
        assert f"line {number}: " in result.err
    assert written[6]["id"] == 7 and written[6]["error"]["message"].count("logits_processors") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", "a", "--input", "file"], "not both"),
        (["generate", "--input", "/nowhere/in.jsonl"], "--input /nowhere/in.jsonl: cannot be read"),
        (["generate", "a", "--output", "/nowhere/out.jsonl"], "--output /nowhere/out.jsonl: cannot be written"),
        (["generate", "a", "--top-p", "2"], "--top-p 2.0"),
    ],
)
def test_bad_input_is_told_before_the_engine_starts(run_weft: RunWeft, argv: list[str], message: str) -> None:
    result = run_weft(*argv)
    assert result.status == 2 and message in result.err
    assert result.settings == {}


def test_end_to_end_in_its_own_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", "generate", "12 + 30:", "--max-tokens", "3", "--profile", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "3 tokens" in done.stderr and "Traceback" not in done.stderr
    (trace,) = tmp_path.glob("*.json")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_too_many_logprobs_are_refused_before_the_weights(
    run_weft: RunWeft, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("the engine was built"))
    result = run_weft("generate", "hi", flag, 21)
    assert result.status == 2
    assert f"{flag} 21: at most 20" in result.err and "--max-logprobs" in result.err
    result = run_weft("generate", "hi", flag, 6, "--max-logprobs", 5)
    assert result.status == 2 and "at most 5" in result.err
