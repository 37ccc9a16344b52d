"""Input lines of ``weft generate``: allowed contents, and bad lines that do not affect other lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.cli.jobs import Job, jobs_from_lines, jobs_from_texts
from weft.errors import RequestError
from weft.sampling_params import StructuredOutputsParams


def read(*entries: Any, chat: bool = False, **settings: Any) -> list[Job]:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    return list(jobs_from_lines(lines, settings, chat=chat))


def test_three_kinds_of_prompt() -> None:
    text, ids, chat = read(
        {"prompt": "a"}, {"prompt_token_ids": [1, 2]}, {"messages": [{"role": "user", "content": "b"}], "tools": []}
    )
    assert (text.prompt, ids.prompt, chat.prompt) == ("a", [1, 2], None)
    assert chat.messages == [{"role": "user", "content": "b"}] and chat.tools == []
    assert text.error is ids.error is chat.error is None


def test_a_line_goes_before_the_flags() -> None:
    own, flags = read(
        {"prompt": "a", "temperature": 0.5, "id": 7, "priority": 3}, {"prompt": "b"}, temperature=1.0, n=2
    )
    assert (own.params.temperature, own.params.n, own.id, own.priority) == (0.5, 2, 7, 3)
    assert (flags.params.temperature, flags.params.n, flags.id, flags.priority) == (1.0, 2, None, 0)


def test_token_ids_as_keys() -> None:
    assert read({"prompt": "a", "logit_bias": {"5": 2.0}})[0].params.logit_bias == {5: 2.0}


def test_constraints_on_the_form_of_the_text() -> None:
    good, two, unknown, callables = read(
        {"prompt": "a", "structured_outputs": {"choice": ["x"]}, "truncate_prompt_tokens": 5},
        {"prompt": "a", "structured_outputs": {"choice": ["x"], "regex": "y"}},
        {"prompt": "a", "structured_outputs": {"shape": "round"}},
        {"prompt": "a", "logits_processors": ["x"]},
    )
    assert good.error is None and good.params.truncate_prompt_tokens == 5
    assert good.params.structured_outputs == StructuredOutputsParams(choice=["x"])
    wrong = (two, "regex and choice"), (unknown, "unknown field `shape`"), (callables, "keys logits_processors")
    for job, message in wrong:
        assert job.error is not None and message in str(job.error)


def test_numbers_count_blank_lines() -> None:
    assert [job.number for job in read({"prompt": "a"}, "", "  ", {"prompt": "b"})] == [1, 4]


def test_chat_makes_messages_of_texts() -> None:
    (line,) = read({"prompt": "a"}, chat=True)
    (argument,) = jobs_from_texts(["a"], {}, chat=True)
    assert line.messages == argument.messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{"prompt": ', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "a list, not an object"),
        ({}, "needs exactly one of prompt, prompt_token_ids, messages; has none"),
        ({"prompt": "a", "messages": []}, "has prompt and messages"),
        ({"prompt": 5}, "prompt is a int"),
        ({"prompt": "a", "temprature": 1}, "unknown keys temprature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "priority": "high"}, "priority='high' is not an integer"),
        ({"prompt": "a", "tools": []}, "tools belong to messages"),
        ({"messages": "hello"}, "messages must be a non-empty list"),
        ({"messages": [{"content": "no role"}]}, "messages must be a non-empty list"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_line_is_an_error_of_its_own(entry: Any, message: str) -> None:
    before, bad, after = read({"prompt": "a"}, entry, {"prompt": "b"})
    assert before.error is None and after.error is None
    assert bad.number == 2 and message in str(bad.error)


def test_bad_flags_stop_everything() -> None:
    with pytest.raises(RequestError, match="temperature"):
        read({"prompt": "a"}, temperature=-1.0)
