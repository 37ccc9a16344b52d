"""Check that every field of a responses or messages request reaches its own field of a chat completion."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weft.server import anthropic_messages, responses
from weft.server.anthropic_messages import CountTokensRequest, MessagesRequest
from weft.server.protocol import ChatCompletionRequest, ExtraFields
from weft.server.responses import ResponsesRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "adds", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}

EXTRA: dict[str, Any] = {
    "top_k": 3, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.4,
    "logit_bias": {"5": 0.6}, "seed": 7, "stop": ["x"], "include_stop_str_in_output": True, "ignore_eos": False,
    "skip_special_tokens": False, "priority": 8, "request_id": "r", "cache_salt": "s", "include_reasoning": False,
    "structured_outputs": {"regex": "a"}, "chat_template_kwargs": {"k": 1},
}  # fmt: skip


def as_chat(protocol: Any, kind: Any, **fields: Any) -> dict[str, Any]:
    """The fields of the chat that a request becomes, without those that are not given."""
    return given(protocol.to_chat(msgspec.convert(fields, kind)))


def given(chat: ChatCompletionRequest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(chat)
    for name in ("structured_outputs", "response_format"):
        if fields[name] is not None:
            fields[name] = {key: value for key, value in fields[name].items() if value not in (None, False)}
    return {name: value for name, value in fields.items() if value is not None}


def asked(**fields: Any) -> dict[str, Any]:
    return as_chat(responses, ResponsesRequest, **{"input": "x"} | fields)


def test_every_field_of_a_response_arrives() -> None:
    assert set(EXTRA) == set(ExtraFields.__struct_fields__), "a field is missing here"
    got = asked(
        model="m", instructions="be brief", max_output_tokens=9, temperature=0.25, top_p=0.5, stream=True,
        tools=[{"type": "function", "strict": True, **FUNCTION}],
        tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False, reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, top_logprobs=2, **EXTRA,
    )  # fmt: skip
    assert got == EXTRA | {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}],
        "model": "m", "max_tokens": 9, "temperature": 0.25, "top_p": 0.5, "stream": True, "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False,
        "reasoning_effort": "low", "response_format": FORMAT, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ({}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "web_search"}}, {"tool_choice": {"type": "web_search"}}),
        ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
        ({"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_fields_of_a_response(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert asked(**fields) == {"messages": [{"role": "user", "content": "x"}]} | becomes


def _call(id: str, **function: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": function}


def test_items_become_messages() -> None:
    parts = [{"type": "input_text", "text": "add"}]
    items: list[Any] = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}, {"text": ", hm"}]},
        {"type": "message", "role": "assistant", "content": "I will"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "d", "name": "g"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"type": "function_call", "call_id": "e", "name": "g"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "three"},
        {"type": "reasoning", "summary": []},
        {"role": "developer", "content": "end"},
    ]
    first, second, third = (
        _call("c", name="f", arguments='{"a": 1}'),
        *(_call(id, name="g", arguments="{}") for id in "de"),
    )
    assert asked(input=items)["messages"] == [
        {"role": "user", "content": parts},
        {"role": "assistant", "reasoning_content": "hm, hm", "content": "I will", "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": [third]},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "content": "", "reasoning_content": ""},
        {"role": "developer", "content": "end"},
    ]


MESSAGE = {"role": "user", "content": "x"}


def message(*content: Any, **fields: Any) -> dict[str, Any]:
    """Translate an Anthropic request with one user message into a chat request."""
    mine = {"role": "user", "content": list(content) or "x"}
    return as_chat(anthropic_messages, MessagesRequest, **{"messages": [mine], "max_tokens": 9} | fields)


def test_every_field_of_a_message_arrives() -> None:
    same = {"model": "m", "temperature": 0.25, "top_p": 0.5, "top_k": 3, "stream": True}
    got = message(
        system="be brief", stop_sequences=["a", "b"], tools=[{**TOOL, "name": "f", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2000}, chat_template_kwargs={"k": 1},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}, **same,
    )  # fmt: skip
    function = {"name": "f", "description": "", "parameters": SCHEMA}
    assert got == same | {
        "messages": [{"role": "system", "content": "be brief"}, MESSAGE], "max_tokens": 9, "stop": ["a", "b"],
        "tools": [{"type": "function", "function": function}], "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "continue_final_message": False,
        "chat_template_kwargs": {"enable_thinking": True, "k": 1}, "reasoning_effort": "low", "response_format": FORMAT,
    }  # fmt: skip
    counted = {"model": "m", "system": "s", "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"}}
    assert as_chat(anthropic_messages, CountTokensRequest, messages=[MESSAGE], **counted) == {
        "messages": [{"role": "system", "content": "s"}, MESSAGE], "continue_final_message": False, "model": "m",
        "chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, {"tool_choice": "auto"}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"response_format": FORMAT}),
        (
            {"tools": [{"name": "f", "description": "adds", "input_schema": SCHEMA}]},
            {"tools": [{"type": "function", "function": FUNCTION}]},
        ),
    ],
)
def test_fields_of_a_message(fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert message(**fields) == {"messages": [MESSAGE], "max_tokens": 9, "continue_final_message": False} | becomes


def test_blocks_become_messages() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "AA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    blocks: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "dd"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "thinking", "thinking": ", hm"},
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "I will"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "d", "name": "g"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]},
            {"type": "tool_result", "tool_use_id": "d", "content": "3"},
            {"type": "tool_result", "tool_use_id": "e"},
            {"type": "text", "text": "see "}, image, linked,
        ]},
        {"role": "user", "content": []},
    ]  # fmt: skip
    calls = [_call("c", name="f", arguments='{"a": 1}'), _call("d", name="g", arguments="{}")]
    assert message(messages=blocks)["messages"] == [
        {"role": "user", "content": "add"},
        {"role": "assistant", "reasoning_content": "hm, hm", "content": "I will", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "d", "content": "3"},
        {"role": "tool", "tool_call_id": "e", "content": ""},
        {"role": "user", "content": [
            {"type": "text", "text": "see "},
            {"type": "image_url", "image_url": {"url": "data:image/gif;base64,AA"}},
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        ]},
        {"role": "user", "content": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        ({"role": "assistant", "content": "the answer is"}, True),
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}, False),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c"}]}, False),
        ({"role": "user", "content": "x"}, False),
    ],
)
def test_an_answer_that_has_begun_is_continued(last: dict[str, Any], continues: bool) -> None:
    assert message(messages=[MESSAGE, last])["continue_final_message"] is continues
