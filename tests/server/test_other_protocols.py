"""The responses and the messages protocols, through the official clients where a client can say it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from tests.server.running import RunningServer
from weft.server.anthropic_messages import MessagesBuilder
from weft.server.chat_completions import _of_content
from weft.server.errors import ApiError
from weft.server.responses import ResponsesBuilder
from weft.server.sse import JsonResponse, StreamResponse

if TYPE_CHECKING:
    import anthropic  # whose types take seconds

TEXT = "Grüße, 東京 😀"
THOUGHT = "<think>\nhm, hm\n</think>\n\nyes"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "name": "add", "parameters": PARAMETERS}
TOOL = {"name": "add", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def openai(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


# -- responses -------------------------------------------------------------------------------------------------------


def test_response(openai: OpenAI) -> None:
    answer = openai.responses.create(model="weft-mini", input=TEXT, instructions="be brief")
    assert answer.output_text == TEXT and answer.status == "completed"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    cut = openai.responses.create(model="weft-mini", input=TEXT, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [(TEXT, ["message"]), (THOUGHT, ["reasoning", "message"]), (f"do\n{CALL}", ["message", "function_call"])],
)
def test_response_events_add_up(openai: OpenAI, text: str, kinds: list[str]) -> None:
    tools: Any = [FUNCTION]
    whole = openai.responses.create(model="weft-mini", input=text, tools=tools)
    assert [item.type for item in whole.output] == kinds
    events = list(openai.responses.create(model="weft-mini", input=text, tools=tools, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert events[-1].type == "response.completed" and last.output_text == whole.output_text
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in last.output]
    assert rebuilt([event.to_dict() for event in events[2:-1]]) == [item.to_dict() for item in last.output]
    without_ids = [[item.to_dict() | {"id": None, "call_id": None} for item in r.output] for r in (whole, last)]
    assert without_ids[0] == without_ids[1] == [ITEMS[kind](text) for kind in kinds]
    if "function_call" in kinds:
        assert whole.output[1].call_id and done[1].call_id == last.output[1].call_id != whole.output[1].call_id


@pytest.mark.parametrize(
    ("text", "missing", "items"),
    [
        (TEXT, 2, [("message", "incomplete")]),
        (THOUGHT, 4, [("reasoning", "incomplete")]),
        (f"<think>\nhm\n</think>\n\n{TEXT}", 2, [("reasoning", "completed"), ("message", "incomplete")]),
        (f"do\n{CALL}", 9, [("message", "incomplete")]),  # half a call is left out
        (f"do\n{CALL}", 1, [("message", "completed"), ("function_call", "completed")]),
        (CALL, 9, [("message", "incomplete")]),
    ],
)
def test_the_item_in_which_a_response_is_cut_off_is_incomplete(
    openai: OpenAI, text: str, missing: int, items: list[tuple[str, str]]
) -> None:
    asked: dict[str, Any] = {"model": "weft-mini", "input": text, "tools": [FUNCTION]}
    asked["max_output_tokens"] = openai.responses.create(**asked).usage.output_tokens - missing
    whole = openai.responses.create(**asked)
    events = list(openai.responses.create(**asked, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert whole.status == events[-1].response.status == "incomplete"
    for output in (whole.output, events[-1].response.output, done):
        assert [(item.type, item.status) for item in output] == items


ITEMS: dict[str, Any] = {
    "reasoning": lambda text: {
        "id": None, "call_id": None, "type": "reasoning", "summary": [], "status": "completed",
        "content": [{"type": "reasoning_text", "text": "hm, hm"}],
    },
    "message": lambda text: {
        "id": None, "call_id": None, "type": "message", "role": "assistant", "status": "completed",
        "content": [
            {"type": "output_text", "annotations": [], "logprobs": [],
             "text": {THOUGHT: "yes", TEXT: TEXT}.get(text, "do")}
        ],
    },
    "function_call": lambda text: {
        "id": None, "call_id": None, "type": "function_call", "status": "completed", "name": "add",
        "arguments": '{"a": 1}',
    },
}  # fmt: skip
"""Expected items of an answer to a text, with None for ids."""


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the items from the events between the first two and the last, as a client does. Each event names the item
    and the part that it changes."""
    items: list[dict[str, Any]] = []
    closed: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            empty = {"content": []} if "content" in event["item"] else {"arguments": ""}
            assert {name: event["item"][name] for name in empty} == empty
            continue
        item = items[event["output_index"]]
        if kind == "output_item.done":
            assert event["item"] == item | {"status": "completed"}
            assert (item["type"] == "message") == (item["id"] in closed), "a part that was announced is closed"
            items[event["output_index"]] = event["item"]
            continue
        assert event["item_id"] == item["id"] and event.get("content_index", 0) == 0
        assert ("content_index" in event) == (item["type"] != "function_call")
        name, what = kind.rsplit(".", 1)
        if what == "added":
            assert event["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(event["part"])
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
            closed.append(item["id"])
        elif name == "function_call_arguments":
            item["arguments"] += event.get("delta", "")
            assert what == "delta" or event["arguments"] == item["arguments"]
        else:
            if name == "reasoning_text" and not item["content"]:  # its part is not announced
                item["content"].append({"type": name, "text": ""})
            assert item["content"][0]["type"] == name
            item["content"][0]["text"] += event.get("delta", "")
            assert what == "delta" or event["text"] == item["content"][0]["text"]
    return items


def test_a_response_repeats_what_was_asked(server: RunningServer) -> None:
    asked: dict[str, Any] = {
        "model": "other-name", "instructions": "be brief", "max_output_tokens": 2, "temperature": 0.25, "top_p": 0.5,
        "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None}, "text": {"format": {"type": "text"}},
    }  # fmt: skip
    usual: dict[str, Any] = dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p")) | {
        "model": "weft-mini", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}},
    }  # fmt: skip
    always = {
        "object": "response",
        "error": None,
        "store": False,
        "previous_response_id": None,
        "truncation": "disabled",
    }
    for given, cut_off in ((asked, True), ({}, False)):
        body = {"input": TEXT, "stream": True} | given
        text = server.client.post("/v1/responses", json=body).text
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        first, last = events[0]["response"], events[-1]["response"]
        assert events[-1]["type"] == ("response.incomplete" if cut_off else "response.completed")
        for response in (first, events[1]["response"], last):
            assert {name: response[name] for name in usual | always} == usual | always | given
            assert response["id"].startswith("resp-") and response["id"] == last["id"]
            assert response["created_at"] == last["created_at"] > 1e9
        assert (first["status"], first["output"], first["usage"], first["weft"]) == ("in_progress", [], None, None)
        assert first["incomplete_details"] is None and last["status"] == ("incomplete" if cut_off else "completed")
        assert last["incomplete_details"] == ({"reason": "max_output_tokens"} if cut_off else None)
        usage = last["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > usage["output_tokens"] > 0
        assert usage["input_tokens_details"] == {"cached_tokens": 0} and len(last["weft"]["prompts"]) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_format_is_of_the_content_that_a_forced_call_has_not(server: RunningServer, choice: Any) -> None:
    """Instructor sends a format and a forced call together when it asks for objects."""
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    asked = {"tools": [FUNCTION], "tool_choice": choice, "text": {"format": schema}}
    answer = server.client.post("/v1/responses", json={"input": CALL} | asked)
    assert answer.status_code == 200, answer.text
    assert [item["type"] for item in answer.json()["output"]] == ["function_call"]


@pytest.mark.parametrize(
    ("tokens", "content", "its", "behind"),
    [
        (["ab", "c", "\n"], "abc", ["ab", "c"], ["\n"]),
        (["hm", "</think>", "\n", "ye", "s"], "yes", ["ye", "s"], []),
        (["x ", "y"], "x", ["x "], ["y"]),
        (["hm", "</think>"], "", [], []),
        (["\ufffd", "\ufffd"], "é", ["\ufffd", "\ufffd"], []),
        ([], "", [], []),
    ],
)
def test_tokens_behind_content_wait_for_what_becomes_of_them(
    tokens: list[str], content: str, its: list[str], behind: list[str]
) -> None:
    """Space at the end is held back where a tool call may follow, and is content if none does."""
    found = _of_content([{"token": token} for token in tokens], content)
    assert [[entry["token"] for entry in entries] for entries in found] == [its, behind]


def test_log_probabilities_of_a_response(openai: OpenAI, server: RunningServer) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for text in ("abc def", "<think>\nhm\n</think>\n\nyes"):
        whole = openai.responses.create(model="weft-mini", input=text, **asked)
        part = whole.output[-1].content[0]
        assert "".join(entry.token for entry in part.logprobs).strip() == part.text
        assert len(part.logprobs[0].top_logprobs) == 2 and part.logprobs[0].logprob == -1.0
        events = list(openai.responses.create(model="weft-mini", input=text, stream=True, **asked))
        streamed = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
        assert "".join(e.token for e in streamed).strip() == part.text
    plain = openai.responses.create(model="weft-mini", input="abc")
    assert plain.output[0].content[0].logprobs == []
    for field, value in (("include", ["everything"]), ("truncation", "auto"), ("reasoning", {"effort": "huge"})):
        refused = server.client.post("/v1/responses", json={"input": "x", field: value})
        assert refused.status_code == 400 and field.split("_")[0] in refused.json()["error"]["param"]


def test_items_of_a_conversation_come_back(server: RunningServer) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": "thanks"},
    ]
    answer = server.client.post("/v1/responses", json={"input": items, "tools": [FUNCTION]}).json()
    assert answer["output"][0]["content"][0]["text"] == "thanks"
    for bad in (
        {"input": [{"type": "item_reference"}]}, {"input": "x", "previous_response_id": "r"}, {"input": 5},
        {"input": "x", "reasoning": {"effort": 5}}, {"input": [{"type": "reasoning", "content": 5}, items[0]]},
        {"input": [{"type": "reasoning", "content": [{"text": None}]}, items[0]]},
    ):  # fmt: skip
        assert server.client.post("/v1/responses", json=bad).status_code == 400, bad


@pytest.mark.parametrize(
    ("path", "fields"),
    [("responses", {"input": TEXT, "tool_choice": "auto"}),
     ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": TEXT}], "tool_choice": {"type": "auto"}})],
)  # fmt: skip
def test_tools_that_the_server_would_have_to_run_are_refused(server: RunningServer, path: str, fields: Any) -> None:
    assert server.client.post(f"/v1/{path}", json=fields | {"tools": []}).status_code == 200
    answer = server.client.post(f"/v1/{path}", json=fields | {"tools": [{"type": "web_search", "name": "web_search"}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools") and "web_search" in error["message"]


# -- messages --------------------------------------------------------------------------------------------------------


def create(claude: anthropic.Anthropic, content: Any = TEXT, **fields: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return claude.messages.create(**{"model": "weft-mini", "max_tokens": 100, "messages": messages} | fields)


def test_message(claude: anthropic.Anthropic, server: RunningServer) -> None:
    answer = create(claude, system="be brief")
    assert answer.content[0].text == TEXT and answer.stop_reason == "end_turn" and answer.id.startswith("msg-")
    counted = claude.messages.count_tokens(
        model="weft-mini", system="be brief", messages=[{"role": "user", "content": TEXT}]
    )
    assert counted.input_tokens == answer.usage.input_tokens
    assert create(claude, max_tokens=2).stop_reason == "max_tokens"
    stopped = create(claude, stop_sequences=["京"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "京", "Grüße, 東")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [(TEXT, ["text"]), (THOUGHT, ["thinking", "text"]), (f"do\n{CALL}\n{CALL}", ["text", "tool_use", "tool_use"])],
)
def test_message_events_add_up(claude: anthropic.Anthropic, text: str, kinds: list[str]) -> None:
    whole = create(claude, text, tools=[TOOL])
    assert [block.type for block in whole.content] == kinds
    assert whole.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn")
    with claude.messages.stream(
        model="weft-mini", max_tokens=100, messages=[{"role": "user", "content": text}], tools=[TOOL]
    ) as stream:
        events = list(stream)
        last = stream.get_final_message()
    start = next(e for e in events if e.type == "message_start")
    assert start.message.usage.input_tokens == whole.usage.input_tokens
    without_ids = [[block.to_dict() | {"id": None} for block in m.content] for m in (whole, last)]
    assert without_ids[0] == without_ids[1] and last.usage.output_tokens == whole.usage.output_tokens


def test_blocks_of_a_conversation_come_back(claude: anthropic.Anthropic) -> None:
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I will"},
            {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "thanks"},
        ]},
    ]  # fmt: skip
    assert create(claude, messages, tools=[TOOL]).content[0].text == "thanks"


def test_a_prefill_is_continued(claude: anthropic.Anthropic, server: RunningServer) -> None:
    """The fake engine repeats the turn before the last that is begun: with the prefill as its own turn, the user's."""
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "the answer is"}]
    counted = claude.messages.count_tokens(model="weft-mini", messages=messages).input_tokens
    rendered = server.client.post(
        "/tokenize", json={"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ).json()
    assert counted == rendered["count"]
    assert create(claude, messages).usage.input_tokens == counted


def test_system_messages_stand_where_they_are_sent(claude: anthropic.Anthropic, server: RunningServer) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "two"},
    ]
    assert create(claude, messages, system="all").content[0].text == "two"
    rendered = server.client.post("/tokenize", json={"messages": [{"role": "system", "content": "all"}, *messages]})
    assert create(claude, messages, system="all").usage.input_tokens == rendered.json()["count"]


def test_messages_refusals(claude: anthropic.Anthropic, server: RunningServer) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="image"):
        create(claude, [{"role": "user", "content": [{"type": "image"}]}])
    for ask in (create, lambda client, **fields: client.messages.count_tokens(messages=[], **fields)):
        with pytest.raises(anthropic.NotFoundError):
            ask(claude, model="other")
    with pytest.raises(anthropic.BadRequestError, match=r"format\.type='regex' is not json_schema"):
        create(claude, extra_body={"output_config": {"format": {"type": "regex"}}})
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert server.client.post("/v1/messages", json=body).json()["error"]["param"] == "max_tokens"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}
    with pytest.raises(anthropic.BadRequestError, match="neither a text nor a list"):
        create(claude, [result])
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": [1]}]}
    with pytest.raises(anthropic.BadRequestError, match=r"input is no object: \[1\]"):
        create(claude, [{"role": "user", "content": "x"}, call])


def test_errors_of_messages_have_the_types_of_that_protocol(server: RunningServer) -> None:
    """Whoever refuses: the handler, the reading of the body, the table of routes, the gate before them."""
    url, body = "/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": TEXT}]}
    answers = [
        server.client.post(url, json=body | {"model": "other"}),
        server.client.post(url, content=b"x" * (9 << 20)),
        server.client.get(f"{url}/nothing"),
        server.client.post(url, json=body, headers={"Host": "evil.example"}),
    ]
    assert [(answer.status_code, answer.json()["error"]["type"]) for answer in answers] == [
        (404, "not_found_error"), (413, "request_too_large"), (404, "not_found_error"), (403, "permission_error"),
    ]  # fmt: skip
    assert server.client.post("/v1/responses", json={"input": "x", "model": "other"}).json()["error"]["type"] == (
        "invalid_request_error"
    )


@pytest.mark.parametrize("kind", [JsonResponse, StreamResponse])
def test_a_message_that_fails_before_anything_was_sent(kind: Any) -> None:
    sent: list[Any] = []

    async def body() -> Any:
        raise ApiError(503, "no", type="server_error")

    async def events() -> AsyncIterator[bytes]:
        raise ApiError(503, "no", type="server_error")
        yield b""

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        response = kind(events() if kind is StreamResponse else body, lambda: None, 10.0)
        scope: Any = {"type": "http", "path": "/v1/messages", "headers": []}
        await response(scope | {"weft.chunks": None, "weft.on_disconnect": lambda call: None}, None, send)

    asyncio.run(answer())
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["type"]) == (503, "api_error")


@pytest.mark.parametrize("protocol", [MessagesBuilder, ResponsesBuilder])
def test_a_failure_within_a_stream_has_its_own_event(protocol: Any) -> None:
    builder = object.__new__(protocol)
    builder._num_events = 3  # those that were sent
    error = ApiError(500, "no", type="server_error", code="broken", param="input")
    name, _, data = builder.error_events(error).decode().partition("\n")
    told = {"code": "broken", "message": "no", "param": "input", "sequence_number": 3}
    if protocol is MessagesBuilder:
        told = {"error": {"type": "api_error", "message": "no"}}
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == {"type": "error"} | told
