"""Borders of conversations: the last token that a prompt shares with the prompts that can follow it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from weft import LLM, SamplingParams
from weft.engine.borders import conversation_borders
from weft.errors import RequestError


def render(messages: list[Mapping[str, Any]], *, thinks: bool = True) -> str:
    """A template that opens a reasoning block for the answer to come and drops those of earlier answers."""
    parts = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            content = content.rpartition("</think>")[2]
        parts.append(f"<{message['role']}>{content}<end>")
    return "".join(parts) + "<assistant>" + ("<think>" if thinks else "")


def encode(messages: list[Mapping[str, Any]]) -> list[int]:
    return [ord(c) for c in render(messages)]


def borders(messages: list[Mapping[str, Any]]) -> list[str]:
    """The text in front of each border."""
    prompt = render(messages)
    return [prompt[:p] for p in conversation_borders(messages, [ord(c) for c in prompt], encode)]


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "<think>hm</think>Hi"}


def test_border_stands_before_the_reasoning_that_the_next_prompt_drops() -> None:
    assert borders([SYSTEM, USER]) == [
        "<system>Be brief.<end><user>",
        "<system>Be brief.<end><user>Hello<end><assistant>",
    ]


def test_border_of_a_later_turn_is_a_prefix_of_every_next_prompt() -> None:
    messages = [SYSTEM, USER, ANSWER, USER]
    latest = borders(messages)[-1]
    for answer in ("<think>well</think>Yes", "No"):
        assert render([*messages, {"role": "assistant", "content": answer}, USER]).startswith(latest)
    assert latest.endswith("<assistant>")


def test_conversation_without_a_system_message() -> None:
    assert borders([USER]) == ["<user>", "<user>Hello<end><assistant>"]


def test_template_that_refuses_made_up_turns_gives_no_borders() -> None:
    def refuse(messages: list[Mapping[str, Any]]) -> list[int]:
        raise RequestError("only user messages")

    assert conversation_borders([USER], encode([USER]), refuse) == []


def test_next_turn_reuses_the_whole_prompt_when_the_answer_is_rewritten(folder: Path) -> None:
    """The history holds another answer than the one generated, as after dropped reasoning: only that is computed."""
    with LLM(str(folder), max_num_seqs=2) as llm:
        prompt = list(range(100, 170))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt, "checkpoint_positions": [60]}], params, use_tqdm=False)
        (second,) = llm.generate([[*prompt[:60], 5, 6, 7, 8]], params, use_tqdm=False)
        assert second.num_cached_tokens == 60
        assert_idle(llm)


def test_salted_prompts_share_nothing(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=2) as llm:
        prompt, params = list(range(100, 170)), SamplingParams(max_tokens=1)
        salted = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
        found = [llm.generate([p], params, use_tqdm=False)[0].num_cached_tokens for p in salted]
        assert found == [0, 0, 69]


@pytest.mark.parametrize("positions", [[0], [71], [True], "12", [1.0], 5])
def test_positions_that_are_none_are_refused(folder: Path, llm: LLM, positions: Any) -> None:
    with pytest.raises(RequestError, match="checkpoint_positions"):
        llm.generate([{"prompt_token_ids": list(range(70)), "checkpoint_positions": positions}])


@pytest.mark.parametrize("salt", ["", 5])
def test_salts_that_are_none_are_refused(llm: LLM, salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": [1], "cache_salt": salt}])
