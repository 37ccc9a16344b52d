"""LangChain's chat and completion models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.server.running import RunningServer

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

UNICODE = "Grüße aus 東京 😀👩‍👩‍👧 ok"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 348, "b": 275}}\n</tool_call>'
APIS = [False, True]
"""``use_responses_api``."""


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def chat(server: RunningServer, **fields: Any) -> ChatOpenAI:
    fields = {"stream_usage": True, "max_retries": 0} | fields
    return ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", **fields)


@pytest.mark.parametrize("responses", APIS)
def test_chat(server: RunningServer, responses: bool) -> None:
    model = chat(server, use_responses_api=responses)
    answer = model.invoke([SystemMessage("Repeat."), HumanMessage(UNICODE)])
    assert answer.text == UNICODE
    assert answer.usage_metadata["output_tokens"] > 0 and answer.usage_metadata["input_tokens"] > 0
    streamed = list(model.stream(UNICODE))
    assert "".join(chunk.text for chunk in streamed) == UNICODE
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in streamed if chunk.usage_metadata) > 0


def test_stop_strings(server: RunningServer) -> None:
    model = chat(server)
    assert model.invoke(UNICODE, stop=["京"]).text == "Grüße aus 東"
    assert "".join(chunk.text for chunk in model.stream(UNICODE, stop=["京"])) == "Grüße aus 東"


@pytest.mark.parametrize("responses", APIS)
def test_tools(server: RunningServer, responses: bool) -> None:
    model = chat(server, use_responses_api=responses).bind_tools([add])
    asked = model.invoke(CALL)
    assert [(c["name"], c["args"]) for c in asked.tool_calls] == [("add", {"a": 348, "b": 275})]
    result = add.invoke(asked.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert "623" in model.invoke([HumanMessage(CALL), asked, result]).text
    whole = None
    for chunk in model.stream(CALL):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == {"a": 348, "b": 275}


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(server: RunningServer, method: Any) -> None:
    model = chat(server).with_structured_output(Person, method=method)
    assert model.invoke('{"name": "Ada", "age": 36}') == Person(name="Ada", age=36)


def test_logprobs_and_many_at_once(server: RunningServer) -> None:
    model = chat(server, logprobs=True, top_logprobs=2)
    content = model.invoke("abc").response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("abc")

    async def main() -> list[AIMessage]:
        return await chat(server).abatch([f"say {i}" for i in range(20)])

    assert [answer.text for answer in asyncio.run(main())] == [f"say {i}" for i in range(20)]


def test_completions(server: RunningServer) -> None:
    model = OpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_retries=0, max_tokens=4)
    assert model.invoke("one two three four") == "one two three four"[: len(model.invoke("one two three four"))]
    assert "".join(model.stream("one two three four")) == model.invoke("one two three four")
