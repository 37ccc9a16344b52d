"""``weft chat`` without a terminal: turns, commands, errors, and Ctrl-C."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.cli.conftest import RunWeft
from weft.engine.llm import LLM


@pytest.fixture
def conversations(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """Every list of messages that the engine is asked to render."""
    seen: list[list[dict[str, Any]]] = []
    render = LLM.render_chat

    def note(self: LLM, messages: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        seen.append([dict(m) for m in messages])
        return render(self, messages, *args, **kwargs)

    monkeypatch.setattr(LLM, "render_chat", note)
    return seen


def chat(run_weft: RunWeft, *lines: str, flags: tuple[Any, ...] = ("--max-tokens", 4)) -> str:
    result = run_weft("chat", *flags, stdin="".join(line + "\n" for line in lines))
    assert result.status == 0
    return result.out


def test_turns_build_one_conversation(run_weft: RunWeft, conversations: list[list[dict[str, Any]]]) -> None:
    out = chat(run_weft, "What is 2 + 3?", "", "And 4 more?", flags=("--max-tokens", 4, "--system", "Be brief."))
    assert [[m["role"] for m in messages] for messages in conversations] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert conversations[1][2]["content"] in out
    assert [m["content"] for m in conversations[1][::2]] == ["Be brief.", conversations[1][2]["content"]]
    assert [m["content"] for m in conversations[1][1::2]] == ["What is 2 + 3?", "And 4 more?"]
    assert out.count("from the cache") == 2 and "tokens/s" in out


def test_reset_help_exit(run_weft: RunWeft, conversations: list[list[dict[str, Any]]]) -> None:
    out = chat(run_weft, "Hi", "/reset", "Hello", "/help", "/nonsense x", "/exit", "never asked")
    assert [[m["content"] for m in messages] for messages in conversations] == [["Hi"], ["Hello"]]
    assert "/reset  forget" in out and "no command /nonsense" in out
    chat(run_weft, "Hi", "/reset", "Hello", flags=("--max-tokens", 1, "--system", "Be brief."))
    assert [[m["content"] for m in messages] for messages in conversations[2:]] == [
        ["Be brief.", "Hi"],
        ["Be brief.", "Hello"],
    ]


def test_an_answer_that_cannot_go_on_says_why(run_weft: RunWeft) -> None:
    out = chat(run_weft, "Hi", flags=("--allowed-token-ids", 64, "--bad-words", "aa"))
    assert "(after 1 generated tokens, allowed_token_ids and bad_words leave no token" in out and "NaN" not in out


def test_a_refused_turn_leaves_the_conversation(run_weft: RunWeft, conversations: list[list[dict[str, Any]]]) -> None:
    out = chat(run_weft, "1 " * 5000, "Hi")
    assert "error: This model's maximum context length is" in out
    assert [m["content"] for m in conversations[1]] == ["Hi"]


def test_ctrl_c_ends_the_answer_only(run_weft: RunWeft, engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = LLM.step, 0
    before = signal.getsignal(signal.SIGINT)  # of a process in the background: ignored

    def interrupted_step(self: LLM) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted_step)
    out = chat(run_weft, "Hi", "Again", flags=("--max-tokens", 6, "--ignore-eos"))
    assert "(stopped; 3 tokens" in out
    assert "(cut off by the token limit; 6 tokens" in out
    assert signal.getsignal(signal.SIGINT) is before


def test_one_answer_per_turn(run_weft: RunWeft) -> None:
    result = run_weft("chat", "--n", 2)
    assert result.status == 2 and "n=2" in result.err
