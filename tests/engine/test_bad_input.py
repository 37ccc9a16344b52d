"""Bad input gets an error that names the input, the allowed values and a remedy. No other request is disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.tiny_tokenizer import VOCAB_SIZE
from weft.engine.llm import LLM
from weft.errors import CapacityError, ConfigError, RequestError
from weft.sampling_params import SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

PROMPTS: list[tuple[Any, str]] = [
    ("", r"the prompt is empty; it needs at least one token"),
    ([[]], r"the prompt is empty"),
    ([5] * 512, r"maximum context length is 512 tokens.* 512 tokens > 511 maximum.*shorten it"),
    ([VOCAB_SIZE], rf"holds {VOCAB_SIZE}; the vocabulary has {VOCAB_SIZE} ids, 0 to {VOCAB_SIZE - 1}"),
    ([4, -1], r"holds -1; the vocabulary has "),
    ([1, True], r"holds True; every entry must be an integer"),
    ([[1, 2.0]], r"holds 2\.0; every entry must be an integer"),
    ([["a", "b"]], r"holds 'a'; every entry must be an integer"),
    ([None], r"is a NoneType; it must be a list of integers"),
    (7, r"prompts is a int; give a text, token ids, a dict, or a list"),
    (None, r"prompts is a NoneType; give"),
    (b"bytes", r"prompts is a bytes; give"),
    ({}, r"needs 'prompt' \(text\) or 'prompt_token_ids'"),
    ({"prompt": 5}, r"needs 'prompt' \(text\)"),
    ({"prompt": 5, "prompt_token_ids": [1]}, r"prompt is a int"),
    ({"prompt_token_ids": "12"}, r"prompt_token_ids is a str; it must be a list of integers"),
    ({"prompt": "a", "image": 1}, r"unknown keys \['image'\]; allowed are"),
    ("\ud800", r"not valid Unicode"),
    ({"prompt_token_ids": [5, "\ud800"]}, r"holds '\\ud800'; every entry must be an integer"),
    ({"prompt": "a", 5: 1, "image": 1}, r"unknown keys \[5, 'image'\]"),
]

PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [VOCAB_SIZE]}, rf"stop_token_ids holds {VOCAB_SIZE}; the vocabulary has {VOCAB_SIZE} ids"),
    ({"allowed_token_ids": [3, 999]}, r"allowed_token_ids holds 999; the vocabulary"),
    ({"logit_bias": {999: 1.0}}, r"logit_bias holds 999; the vocabulary"),
    ({"allowed_token_ids": [2], "min_tokens": 1}, r"are all ruled out, by min_tokens.*allow more, or lower min_tokens"),
    ({"allowed_token_ids": [68], "bad_words": ["b"]}, r"are all ruled out"),
]


@pytest.mark.parametrize(("bad", "message"), PROMPTS, ids=[repr(bad)[:30] for bad, _ in PROMPTS])
def test_prompts(llm: LLM, bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(bad, GREEDY, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize(("fields", "message"), PARAMS, ids=[next(iter(fields)) for fields, _ in PARAMS])
def test_parameters_that_do_not_fit_the_model(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("hello", SamplingParams(**fields), use_tqdm=False)
    assert_idle(llm)


def test_a_running_request_is_not_disturbed(llm: LLM) -> None:
    want = llm.generate("hello world", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.add_request("hello world", GREEDY, "good")
    bad: list[Callable[[], Any]] = [
        lambda: llm.add_request("", GREEDY),
        lambda: llm.add_request("hi", GREEDY, "good"),
        lambda: llm.add_request([VOCAB_SIZE], SamplingParams(n=3)),
        lambda: llm.add_request("hi", SamplingParams(stop_token_ids=[5000])),
        lambda: llm.add_request("hi", GREEDY, ""),
        lambda: llm.add_request("hi", GREEDY, 5),  # type: ignore[arg-type]
        lambda: llm.add_request("hi", {"n": 2}),  # type: ignore[arg-type]
        lambda: llm.add_request("hi", GREEDY, priority="high"),  # type: ignore[arg-type]
        lambda: llm.generate("hi", GREEDY, use_tqdm=False),
    ]
    output = None
    while not llm.is_finished():
        if bad:
            with pytest.raises(RequestError):
                bad.pop()()
        (output,) = llm.step()
        llm._core.scheduler.check()
    assert output is not None and output.outputs[0].token_ids == want
    assert not bad or len(bad) == 1


def test_what_no_message_can_hold(llm: LLM) -> None:
    for given, message in (
        ({"priority": -(2**64)}, "is not a 64-bit integer"),
        ({"request_id": "\ud800"}, "not valid Unicode"),
        ({"prompt": {"prompt": "a", "cache_salt": "\ud800"}}, "not valid Unicode"),
    ):
        arguments: dict[str, Any] = {"prompt": "a"} | given
        with pytest.raises(RequestError, match=message):
            llm.add_request(sampling_params=GREEDY, **arguments)
    schema = StructuredOutputsParams(json={"a": object()})
    with pytest.raises(RequestError, match="not a JSON schema: Object of type object"):
        llm.add_request("a", SamplingParams(structured_outputs=schema))
    assert_idle(llm)


def test_one_bad_prompt_starts_none_of_the_batch(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(n=2), GREEDY]
    with pytest.raises(RequestError, match="holds 9999"):
        llm.generate(["hello", "world", [9999]], params, use_tqdm=False)
    assert_idle(llm)
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_lists_of_the_wrong_length_or_type(llm: LLM) -> None:
    for given, message in (
        ([GREEDY], "has 1 entries for 2 prompts; give one for all prompts"),
        ([], "has 0 entries for 2 prompts"),
        ([GREEDY, None], "holds a NoneType, not SamplingParams"),
        ({"temperature": 0}, "is a dict, not SamplingParams"),
    ):
        with pytest.raises(RequestError, match=f"sampling_params {message}"):
            llm.generate(["a", "b"], given, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2, 3])
    with pytest.raises(RequestError, match="priority is a NoneType, not int"):
        llm.generate("a", GREEDY, use_tqdm=False, priority=None)  # type: ignore[arg-type]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "non-empty list"),
        ("hello", {}, "non-empty list"),
        ([{"content": "hello"}], {}, "at least a 'role'"),
        ([["hello"]], {}, "at least a 'role'"),
        ([{"role": "user"}], {}, "has no content"),
        ([None], {}, "a conversation is a NoneType; give a list"),
        (["hello"], {}, "a conversation is a str; give a list"),
        ([{"role": "\ud800", "content": "x"}], {}, "not valid Unicode"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "exclude each other"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"tokenize": True}}, "holds tokenize"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": [1]}, "chat_template_kwargs is a list"),
        ([{"role": "user", "content": "x"}], {"tools": ["add"]}, "tools"),
    ],
)
def test_chats(llm: LLM, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert_idle(llm)


def test_what_needs_a_tokenizer_says_so(folder: Path) -> None:
    with LLM(str(folder), skip_tokenizer_init=True) as engine:
        for call, message in (
            (lambda: engine.generate("text", GREEDY, use_tqdm=False), "text prompt needs the tokenizer"),
            (lambda: engine.generate([5], SamplingParams(stop="a"), use_tqdm=False), "use stop_token_ids"),
            (lambda: engine.generate([5], SamplingParams(bad_words=["a"]), use_tqdm=False), "use a logit_bias"),
            (lambda: engine.chat([{"role": "user", "content": "x"}], GREEDY), "give token ids to generate"),
        ):
            with pytest.raises(RequestError, match=message):
                call()
        assert_idle(engine)


def test_a_prompt_longer_than_a_small_cache(folder: Path) -> None:
    with LLM(str(folder), num_kv_pages=3, page_size=8) as engine:
        with pytest.raises(RequestError, match=r"context length is 16 tokens.* 16 tokens > 15 maximum"):
            engine.generate([5] * 16, GREEDY, use_tqdm=False)
        assert len(engine.generate([5] * 15, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seqs": 4}, "unknown setting 'max_seqs'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is out of range"),
        ({"dtype": "int8"}, "dtype='int8' is not known; allowed: auto, float32"),
        ({"schedule_policy": "lifo"}, "schedule_policy='lifo' is not known"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_seqs"),
        ({"cpu_cache_gib": 1e-6}, "too little|raise cpu_cache_gib"),
    ],
)
def test_settings(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, CapacityError), match=message):
        LLM(str(folder), **settings)
