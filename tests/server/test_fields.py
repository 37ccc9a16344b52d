"""Every field that a request model declares is read when it is given: none is accepted and then dropped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from tests.patience import GUARD_S
from tests.server.fake_engine import CAPACITY
from tests.server.test_async_engine import Link
from weft.config import EngineConfig, resolve
from weft.engine.async_engine import AsyncEngine
from weft.engine.input_processor import InputProcessor
from weft.errors import RequestError
from weft.server.admission import Admission
from weft.server.api_call import Context
from weft.server.app import POSTS
from weft.server.client import Client
from weft.server.errors import ApiError
from weft.server.protocol import NO_EFFECT, REFUSED, BodyReader
from weft.server.rendering import RenderPool
from weft.server.settings import ServerSettings
from weft.text.tokenizer import Tokenizer

TOOL = {"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {"type": "object"}}

SCHEMA = {"type": "object"}
MESSAGES = [{"role": "user", "content": "one two"}]

NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "one two"},
    "/v1/responses": {"input": "one two"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [1, 2]},
}
BESIDE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "best_of": {"n": 2},
}
"""Further fields that a body needs for a field to be read."""

VALUES: dict[str, Any] = {
    "model": "weft-mini", "stream": True, "stream_options": {}, "messages": MESSAGES, "tools": [TOOL],
    "logit_bias": {"5": 1.0}, "response_format": {"type": "text"}, "structured_outputs": {"json_object": True},
    "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: /a/",
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA}, "thinking": {"type": "enabled"},
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "truncation": "disabled",
    "include": ["message.output_text.logprobs"], "tool_choice": "auto", "reasoning_effort": "low", "suffix": "",
    "best_of": 2, "truncate_prompt_tokens": 5, "truncation_side": "left",
    "prompt": "one", "input": "one", "n": 2, "temperature": 0.5,
}  # fmt: skip
"""A value of each field that cannot be made from its type alone."""


def value_of(name: str, kind: Any) -> Any:
    if name in VALUES:
        return VALUES[name]
    for wanted, value in ((bool, True), (int, 1), (float, 0.5), (str, "a"), (list[int], [1]), (list[str], ["a"])):
        if kind == wanted or kind == wanted | None:
            return value
    if kind in (str | list[str] | None, str | list[dict[str, Any]] | None):
        return "a"
    if kind == dict[str, Any] | None:
        return {}
    raise AssertionError(f"give VALUES an entry for {name}: {kind}")


class Recorded:
    """Records the attributes that are read of a request and of objects inside, through a subclass of its model."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.read: set[str] = set()
        self.kind = self._noting(kind, "")

    def _noting(self, kind: type[msgspec.Struct], where: str) -> type[msgspec.Struct]:
        read, plain = self.read, kind.__getattribute__

        def note(instance: Any, name: str) -> Any:
            read.add(where + name)
            return plain(instance, name)

        namespace = {"__getattribute__": note}
        inner = [
            (name, self._noting(each, f"{where}{name}.") | None, None) for name, each in objects_of(kind).items()
        ]  # fmt: skip
        return msgspec.defstruct(kind.__name__, inner, bases=(kind,), namespace=namespace, kw_only=True)


def objects_of(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the fields that are objects with declared fields. Skip frozen objects, which convert as a whole."""
    hints = get_type_hints(kind)
    found = {name: get_args(hint) for name, hint in hints.items() if name in kind.__struct_fields__}
    return {
        name: each
        for name, kinds in found.items()
        for each in kinds
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and not each.__struct_config__.frozen
    }


def levels(kind: type[msgspec.Struct], where: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Each object of a body that has declared fields, by its path."""
    for name, inner in objects_of(kind).items():
        yield f"{where}{name}.", inner
        yield from levels(inner, f"{where}{name}.")


class Bodies(BodyReader):
    """Reads every body as the recording kind."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        super().__init__(strict=True)
        self._kind = kind

    def read(self, body: bytes, kind: Any) -> Any:
        return super().read(body, self._kind)


class FakeService:
    """The service that handlers need, over an engine in this process."""

    model_name = "weft-mini"
    keeps_states = True
    created = 0
    capacity = CAPACITY

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.link = Link()
        self.engine = self.link.engine = AsyncEngine(
            self.link, InputProcessor(config, tokenizer, CAPACITY.max_model_len), tokenizer
        )
        self.admission = Admission(8, 8)
        self.render = RenderPool(2.0)
        self.grammars = self

    async def check(self, grammar: str, param: str) -> None:
        """Every grammar compiles."""


class Silent:
    """Metrics and log that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[EngineConfig, Tokenizer]]:
    config = resolve(device="cpu")
    yield config, Tokenizer.load(config.tokenizer_path)


def fields_read(path: str, kind: type[msgspec.Struct], body: dict[str, Any], parts: Any) -> set[str]:
    """Answer a request and return the attributes that were read, or the field that a refusal names."""

    async def main() -> set[str]:
        recorded = Recorded(kind)
        service: Any = FakeService(*parts)
        silent: Any = Silent()
        context = Context(service, ServerSettings(), Bodies(recorded.kind), silent, silent)
        try:
            response = await POSTS[path][0](context, json.dumps(body).encode(), Client())
        except (RequestError, ApiError) as refusal:
            assert refusal.param in body
            return {str(refusal.param)}
        if callable(response):
            sent: list[Any] = []
            answering = asyncio.create_task(_answer(response, sent))
            while not answering.done():
                service.link.run()
                await asyncio.sleep(0)
            assert sent[0]["status"] == 200, sent
        service.render.close()
        return recorded.read

    return asyncio.run(asyncio.wait_for(main(), GUARD_S))


async def _answer(response: Any, sent: list[Any]) -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": "/", "weft.chunks": SimpleNamespace(is_free=False)}
    await response(scope | {"weft.on_disconnect": lambda call: None}, receive, send)


CASES = [
    (path, field.name) for path, (_, kind) in POSTS.items() for field in msgspec.structs.fields(kind)
]  # fmt: skip


def body_with(path: str, name: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    type_of = {field.name: field.type for field in msgspec.structs.fields(kind)}
    body = NEEDED[path] | {k: v for k, v in BESIDE.get(name, {}).items() if k in type_of}
    if name == "messages" and path == "/tokenize":
        body = {}
    if path == "/tokenize" and name in (
        "tools",
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
    ):
        body = {k: v for k, v in body.items() if k != "prompt"} | {"messages": MESSAGES}
    if name == "continue_final_message":
        body["messages"] = [*MESSAGES, {"role": "assistant", "content": "so"}]
    if path.startswith("/v1/messages") and name == "tool_choice":
        return body | {"tool_choice": {"type": "auto"}}
    return body | ({} if name in NEEDED[path] and name in body else {name: value_of(name, type_of[name])})


@pytest.mark.parametrize(("path", "name"), CASES)
def test_every_declared_field_is_read(path: str, name: str, parts: Any) -> None:
    kind = POSTS[path][1]
    assert name in fields_read(path, kind, body_with(path, name, kind), parts)


def test_a_field_that_nothing_reads_is_found(parts: Any) -> None:
    path = "/v1/chat/completions"
    kind = msgspec.defstruct("Wider", [("promised", int | None, None)], bases=(POSTS[path][1],), kw_only=True)
    read = fields_read(path, kind, NEEDED[path] | {"promised": 1}, parts)
    assert "promised" not in read and "messages" in read


NESTED: dict[str, Any] = {
    "stream_options.include_usage": True, "stream_options.continuous_usage_stats": True,
    "stream_options.include_obfuscation": False,
    "response_format.type": "json_object", "response_format.json_schema": {"schema": SCHEMA},
    "output_config.effort": "low", "output_config.format": {"type": "json_schema", "schema": SCHEMA},
    "text.format": {"type": "json_object"}, "reasoning.effort": "low", "reasoning.summary": "auto",
    "thinking.type": "enabled", "thinking.budget_tokens": 1024,
}  # fmt: skip
"""A value of each field inside of an object."""

NESTED_BESIDE: dict[str, dict[str, Any]] = {
    "stream_options.continuous_usage_stats": {"include_usage": True},
    "response_format.json_schema": {"type": "json_schema"},
    "stream_options.include_obfuscation": {}, "thinking.budget_tokens": {"type": "enabled"},
}  # fmt: skip

ACCEPTED_UNREAD = {"thinking.budget_tokens", "reasoning.summary"}
"""Bounds and forms that clients have to send, without effect: docs/serving.md says so."""

NESTED_CASES = [
    (path, where, field.name)
    for path, (_, kind) in POSTS.items()
    for where, inner in levels(kind)
    for field in msgspec.structs.fields(inner)
]


@pytest.mark.parametrize(("path", "where", "name"), NESTED_CASES)
def test_every_field_of_an_object_is_read(path: str, where: str, name: str, parts: Any) -> None:
    outer = where.split(".")[0]
    body = body_with(path, outer, POSTS[path][1])
    body[outer] = NESTED_BESIDE.get(where + name, {}) | {name: NESTED[where + name]}
    if outer == "stream_options":
        body["stream"] = True
    read = fields_read(path, POSTS[path][1], body, parts)
    assert where + name in read | ACCEPTED_UNREAD or outer in read & {"response_format", "structured_outputs"}


@pytest.mark.parametrize(
    ("path", "where"), [("", ""), *((path, where) for path, (_, kind) in POSTS.items() for where, _ in levels(kind))]
)
def test_unknown_and_refused_fields_of_an_object(path: str, where: str) -> None:
    for route, (_, kind) in POSTS.items() if not path else [(path, POSTS[path])]:
        for name, message in (("surprise", "unknown field"), ("verbosity", "verbosity is not supported")):
            inside: Any = {name: "low"}
            for outer in reversed(where.split(".")[:-1]):
                inside = {outer: inside}
            body = json.dumps(NEEDED[route] | inside).encode()
            with pytest.raises(RequestError, match=message) as refused:
                BodyReader(strict=True).read(body, kind)
            assert refused.value.param == (where + name).split(".")[0]


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("verbosity", "medium", False), ("verbosity", "low", True), ("modalities", ["text"], False),
        ("modalities", ["text", "audio"], True), ("spaces_between_special_tokens", True, False),
        ("spaces_between_special_tokens", False, True), ("max_tool_calls", 3, True), ("max_tool_calls", None, False),
        ("mcp_servers", [{"url": "x"}], True), ("mcp_servers", [], False), ("container", "c", True),
    ],
)  # fmt: skip
def test_values_that_match_what_the_server_does_are_taken(name: str, value: Any, is_refused: bool) -> None:
    for path, (_, kind) in POSTS.items():
        body = json.dumps(NEEDED[path] | {name: value}).encode()
        if not is_refused:
            BodyReader(strict=False).read(body, kind)
            continue
        with pytest.raises(RequestError, match=f"{name} is not supported"):
            BodyReader(strict=False).read(body, kind)


def test_fields_that_are_refused_by_name() -> None:
    for path, (_, kind) in POSTS.items():
        for name in sorted(REFUSED.keys() - set(kind.__struct_fields__)):
            body = json.dumps(NEEDED[path] | {name: ["x"]}).encode()
            with pytest.raises(RequestError, match=f"{name} is not supported") as refused:
                BodyReader(strict=False).read(body, kind)
            assert refused.value.param == name
    assert not REFUSED.keys() & NO_EFFECT


KNOWN_TO_VLLM = {
    "/v1/chat/completions": "thinking_token_budget length_penalty spaces_between_special_tokens truncation_side echo "
    "logprob_token_ids add_special_tokens media_io_kwargs mm_processor_kwargs return_token_offsets return_prompt_text "
    "return_assistant_tokens_mask kv_transfer_params ec_transfer_params vllm_xargs repetition_detection",
    "/v1/completions": "length_penalty spaces_between_special_tokens truncation_side logprob_token_ids "
    "return_token_offsets kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget",
    "/v1/responses": "logit_bias include_reasoning top_k skip_special_tokens include_stop_str_in_output "
    "presence_penalty frequency_penalty request_id media_io_kwargs mm_processor_kwargs priority cache_salt "
    "enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop ignore_eos "
    "vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs",
    "/v1/messages": "kv_transfer_params ec_transfer_params chat_template_kwargs",
    "/tokenize": "media_io_kwargs mm_processor_kwargs return_token_strs",
}
"""Fields that vLLM 0.26 adds to the protocols."""


@pytest.mark.parametrize("path", KNOWN_TO_VLLM)
def test_vllms_fields_are_read_or_refused_by_name(path: str) -> None:
    for name in KNOWN_TO_VLLM[path].split():
        assert name in {*POSTS[path][1].__struct_fields__, *REFUSED, *NO_EFFECT}, name
