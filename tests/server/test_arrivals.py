"""Check that all fields of a request reach the engine as fields of their own, with the caller's and the prompt's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from tests.patience import GUARD_S
from tests.server.test_fields import FakeService, Silent
from weft.config import EngineConfig, resolve
from weft.engine.chat_prompts import ChatPrompts
from weft.engine.input_processor import derive_seed
from weft.errors import RequestError
from weft.request import RequestSpec
from weft.server import api_call, chat_completions
from weft.server.api_call import Context
from weft.server.app import POSTS
from weft.server.client import Client
from weft.server.errors import ApiError
from weft.server.protocol import BodyReader, CompletionRequest
from weft.server.sampling import names_ids
from weft.server.settings import ServerSettings
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer

CLIENT = Client(identity="key", connection="1.2.3.4:5")

SAMPLED = {
    "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.25,
    "frequency_penalty": 0.375, "repetition_penalty": 1.5, "seed": 11, "min_tokens": 3, "allowed_token_ids": [5, 6],
}  # fmt: skip
"""Fields that a sampler takes as they are."""

OTHERS: dict[str, Any] = {
    "logit_bias": {"5": 0.625}, "bad_words": ["quick"], "stop_token_ids": [9, 10], "priority": 4, "cache_salt": "salt",
    "checkpoint_positions": [1], "request_id": "mine", "prompt_logprobs": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[EngineConfig, Tokenizer]]:
    config = resolve(device="cpu", seed=3)
    yield config, Tokenizer.load(config.tokenizer_path)


def sent(path: str, body: dict[str, Any], parts: Any, **settings: Any) -> list[RequestSpec]:
    """The requests that the engine is sent for a call."""

    async def main() -> list[RequestSpec]:
        service: Any = FakeService(*parts)
        silent: Any = Silent()
        context = Context(service, ServerSettings(**settings), BodyReader(strict=True), silent, silent)
        try:
            await POSTS[path][0](context, json.dumps(body).encode(), CLIENT)
        except (RequestError, ApiError):
            assert not service.admission.num_open and not service.link.inbox, "a refused call leaves nothing"
            raise
        finally:
            service.render.close()
        assert service.admission.num_open == len(service.link.inbox), "completions are counted as they are admitted"
        return list(service.link.inbox)

    return asyncio.run(asyncio.wait_for(main(), GUARD_S))


CHAT = {"messages": [{"role": "user", "content": "one two"}], "logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 8}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 9, "max_completion_tokens": 8}),
        ("/v1/completions", {"prompt": "one two", "max_tokens": 8, "logprobs": 2}),
    ],
)  # fmt: skip
def test_every_field_arrives(path: str, body: dict[str, Any], parts: Any) -> None:
    first, second = sent(path, body | SAMPLED | OTHERS | {"n": 2}, parts)
    assert {name: getattr(first.sampling, name) for name in SAMPLED} == SAMPLED
    sampling, eos = first.sampling, parts[0].eos_token_ids
    assert sampling.logit_bias == {5: 0.625} and sampling.blocked_before_min == sorted({9, 10, *eos})
    words = {parts[1].decode(ids, skip_special_tokens=False).strip() for ids in sampling.bad_words or ()}
    assert words == {"quick"}
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 6)
    assert (first.max_tokens, first.stop_token_ids, first.eos_token_ids) == (8, {9, 10}, set(eos))
    assert (first.priority, first.cache_salt, first.caller) == (4, "key:salt", "key")
    assert 1 in first.checkpoint_positions and first.request_id.partition("-")[2] == f"mine/{first.arrival}"
    assert second.sampling.seed != 11 and second.prompt_token_ids == first.prompt_token_ids
    assert second.request_id != first.request_id


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_a_request_does_not_say_is_the_models(path: str, parts: Any) -> None:
    config, tokenizer = parts
    body = {"messages": CHAT["messages"]} if path.endswith("chat/completions") else {"prompt": "one two"}
    (spec,) = sent(path, body, parts)
    defaults, room = config.generation, FakeService.capacity.max_model_len - len(spec.prompt_token_ids)
    assert spec.sampling.temperature == (1.0 if defaults.temperature is None else defaults.temperature)
    assert spec.sampling.seed == derive_seed(3, 1) and spec.sampling.logprobs is spec.sampling.grammar is None
    assert spec.max_tokens == (16 if path == "/v1/completions" else defaults.max_new_tokens or room)
    assert (spec.priority, spec.cache_salt, spec.sampling.min_tokens) == (0, "key", 0) and not spec.stop_token_ids
    (free,) = sent(path, body | {"ignore_eos": True}, parts)
    assert free.eos_token_ids == frozenset() and spec.eos_token_ids == set(config.eos_token_ids)
    if path == "/v1/completions":
        assert spec.prompt_token_ids.tolist() == tokenizer.encode("one two")
        specs = sent(path, {"prompt": [[1, 2], [3]], "n": 2}, parts)
        assert [spec.prompt_token_ids.tolist() for spec in specs] == [[1, 2], [1, 2], [3], [3]]


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BEGUN = [*CHAT["messages"], {"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"messages": BEGUN, "continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"tools": [FUNCTION]}, {"tools": [FUNCTION]}),
        ({"tools": [FUNCTION], "tool_choice": "none"}, {}),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False, "a": 1}},
        ),
        ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ({"truncate_prompt_tokens": 5}, {"limit": None}),
    ],
)
def test_what_a_chat_says_reaches_its_template(
    fields: dict[str, Any], given: dict[str, Any], parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    render, encode = ChatPrompts.render, ChatPrompts.encode

    def rendered(self: ChatPrompts, messages: Any, options: TemplateOptions, **more: Any) -> Any:
        seen.update(asdict(options) | more)
        return render(self, messages, options, **more)

    def encoded(self: ChatPrompts, chat: Any, limit: int | None = None) -> Any:
        seen["limit"] = limit
        return encode(self, chat, limit)

    monkeypatch.setattr(ChatPrompts, "render", rendered)
    monkeypatch.setattr(ChatPrompts, "encode", encoded)
    (spec,) = sent("/v1/chat/completions", {"messages": CHAT["messages"]} | fields, parts)
    usual = {"tools": None, "chat_template_kwargs": None, "add_generation_prompt": True, "turn_boundaries": True}
    usual |= {"continue_final_message": False, "limit": FakeService.capacity.max_model_len}
    assert seen == usual | given
    assert (len(spec.prompt_token_ids) == 5) == ("truncate_prompt_tokens" in fields)


@pytest.mark.parametrize(
    ("parser", "fields", "given"),
    [
        ("auto", {}, {}),
        ("none", {}, {"reasoning": False, "in_reasoning": False}),
        ("auto", {"tools": [FUNCTION]}, {"tools": {"f": {"type": "object"}}}),
        (
            "auto",
            {"tools": [FUNCTION], "parallel_tool_calls": False},
            {"tools": {"f": {"type": "object"}}, "several": False},
        ),
    ],
)
def test_what_a_chat_says_reaches_the_parser_of_its_answer(
    parser: str, fields: dict[str, Any], given: dict[str, Any], parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template has opened the reasoning."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(chat_completions, "OutputParser", lambda **more: seen.append(more))
    monkeypatch.setattr(chat_completions, "opens_reasoning", lambda prompt: True)
    body = {"messages": CHAT["messages"], "n": 2}
    sent("/v1/chat/completions", body | fields, parts, reasoning_parser=parser)
    assert seen == [{"reasoning": True, "in_reasoning": True, "tools": None, "several": True} | given] * 2


def test_special_tokens_are_added_unless_a_completion_says_no(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode

    def with_bos(self: Tokenizer, text: str, *, add_special_tokens: bool = True, **more: Any) -> list[int]:
        return [7] * add_special_tokens + encode(self, text, add_special_tokens=False, **more)

    plain = encode(parts[1], "one two", add_special_tokens=False)
    monkeypatch.setattr(Tokenizer, "encode", with_bos)
    for adds in (None, True, False):
        (spec,) = sent("/v1/completions", {"prompt": "one two", "add_special_tokens": adds}, parts)
        assert spec.prompt_token_ids.tolist() == (plain if adds is False else [7, *plain])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"guided_regex": "[xy]{7}"}, "[xy]{7}"),
        ({"guided_choice": ["red", "blue"]}, "red"),
        ({"guided_grammar": 'start: "green"'}, "green"),
        ({"guided_json": {"type": "object", "required": ["size"]}}, "size"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"required": ["size"]}}}}, "size"),
        ({"response_format": {"type": "json_object"}}, "object"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_constraint_arrives_as_a_grammar_that_was_tried(
    path: str, fields: dict[str, Any], word: str, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, str]] = []

    async def check(self: FakeService, grammar: str, param: str) -> None:
        tried.append((grammar, param))
        if len(tried) > 2:
            raise RequestError("it does not compile", param)

    monkeypatch.setattr(FakeService, "check", check)
    body = {"messages": CHAT["messages"]} if path.endswith("chat/completions") else {"prompt": "one two"}
    (spec,) = sent(path, body | fields, parts)
    grammar = spec.sampling.grammar
    assert grammar is not None and word in grammar and "</think>" not in grammar
    assert tried == [(grammar, next(iter(fields)))]
    monkeypatch.setattr(api_call, "opens_reasoning", lambda prompt: True)
    if "guided_grammar" not in fields:
        (spec,) = sent(path, body | fields, parts)
        assert word in (spec.sampling.grammar or "") and "</think>" in (spec.sampling.grammar or "")
    with pytest.raises(RequestError, match=r"it does not compile|cannot follow reasoning"):
        sent(path, body | fields, parts)


@pytest.mark.parametrize(
    ("name", "is_fine"), [("x" * 128, True), ("x" * 129, False), ("", False), ("é", False), ("\n", False)]
)
def test_names_of_requests(name: str, is_fine: bool, parts: Any) -> None:
    body = {"prompt": "one two", "request_id": name}
    if is_fine:
        (spec,) = sent("/v1/completions", body, parts)
        assert f"-{name}/" in spec.request_id
        return
    with pytest.raises(RequestError, match="1 to 128 printable ASCII") as refused:
        sent("/v1/completions", body, parts)
    assert refused.value.param == "request_id"


@pytest.mark.parametrize(
    ("setting", "limit", "body", "param"),
    [
        ("max_n", 2, {"n": 2}, "n"),
        ("max_prompts", 2, {"prompt": ["a", "b"]}, "prompt"),
        ("max_schema_bytes", len("answer: /[ab]{9}/"), {"guided_regex": "[ab]{9}"}, "guided_regex"),
    ],
)
def test_limits_of_the_server_hold(setting: str, limit: int, body: dict[str, Any], param: str, parts: Any) -> None:
    assert sent("/v1/completions", {"prompt": "a"} | body, parts, **{setting: limit})
    with pytest.raises(RequestError) as refused:
        sent("/v1/completions", {"prompt": "a"} | body, parts, **{setting: limit - 1})
    assert refused.value.param == param


FINE: list[dict[str, Any]] = [
    {"n": 2, "best_of": 2}, {"n": 2, "best_of": 1}, {"suffix": ""}, {"truncation_side": "left"},
    {"echo": True, "logprobs": 1}, {"echo": True, "stream": True}, {"stream": True, "logprobs": 1},
    {"stream": True, "stream_options": {}}, {"prompt_logprobs": 1}, {"priority": 2**31 - 1},
    {"bad_words": ["a"] * 512}, {"response_format": {"type": "text"}, "guided_regex": "a"}, {"cache_salt": "s"},
    {"logit_bias": {"5": 1}},
]  # fmt: skip


@pytest.mark.parametrize("fields", FINE, ids=str)
def test_what_is_taken(fields: dict[str, Any], parts: Any) -> None:
    assert len(sent("/v1/completions", {"prompt": "a"} | fields, parts)) == fields.get("n", 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"echo": True, "stream": True, "logprobs": 1}, "stream"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"priority": 2**31}, "priority"),
        ({"top_k": 2**31}, "top_k"),
        ({"bad_words": ["a"] * 513}, "bad_words"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml", "json_schema": {"schema": {}}}}, "response_format"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"٥": 1}}, "logit_bias"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str, parts: Any) -> None:
    with pytest.raises(RequestError) as refused:
        sent("/v1/completions", {"prompt": "a"} | fields, parts)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("server", "request_says", "by_id"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_a_request_decides_how_tokens_are_named(server: bool, request_says: bool | None, by_id: bool) -> None:
    request = CompletionRequest(prompt="a", return_tokens_as_token_ids=request_says)
    assert names_ids(request, ServerSettings(return_tokens_as_token_ids=server)) is by_id
