"""What the engine is sent for a call: every field of the request, as its own, with the caller's and the prompt's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_fields import FakeService, Silent
from weft.config import EngineConfig, resolve
from weft.engine.inputs import derive_seed
from weft.errors import RequestError
from weft.request import RequestSpec
from weft.server.api_call import Context
from weft.server.app import POSTS
from weft.server.client import Client
from weft.server.protocol import BodyReader
from weft.server.settings import ServerSettings
from weft.tokenizer import Tokenizer

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
        finally:
            service.render.close()
        assert service.admission.num_open == len(service.link.inbox), "completions are counted as they are admitted"
        return list(service.link.inbox)

    return asyncio.run(asyncio.wait_for(main(), 20))


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
def test_a_constraint_arrives_as_a_grammar(path: str, fields: dict[str, Any], word: str, parts: Any) -> None:
    prompt = {"messages": CHAT["messages"]} if path.endswith("chat/completions") else {"prompt": "one two"}
    (spec,) = sent(path, prompt | fields, parts)
    assert spec.sampling.grammar is not None and word in spec.sampling.grammar


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
