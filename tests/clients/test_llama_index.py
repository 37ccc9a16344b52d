"""LlamaIndex's model for servers that speak OpenAI's protocol. Runs in an environment of its own: make test-clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.server.running import RunningServer

pytest.importorskip("llama_index.llms.openai_like", reason="LlamaIndex is not installed; make test-clients has it")
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

UNICODE = "Grüße aus 東京 😀👩‍👩‍👧 ok"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 348, "b": 275}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def model(server: RunningServer, **fields: Any) -> OpenAILike:
    fields = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "max_tokens": 100} | fields
    return OpenAILike(model=MODEL, api_base=f"{server.url}/v1", api_key="none", **fields)


def test_chat_whole_streamed_and_async(server: RunningServer) -> None:
    llm, messages = model(server), [ChatMessage(role="user", content=UNICODE)]
    assert llm.chat(messages).message.content == UNICODE
    chunks = list(llm.stream_chat(messages))
    assert "".join(chunk.delta or "" for chunk in chunks) == chunks[-1].message.content == UNICODE
    assert asyncio.run(llm.achat(messages)).message.content == UNICODE


def test_completions(server: RunningServer) -> None:
    llm = model(server, is_chat_model=False, max_tokens=4)
    whole = llm.complete("one two three four").text
    assert whole and "one two three four".startswith(whole)
    assert "".join(chunk.delta or "" for chunk in llm.stream_complete("one two three four")) == whole


def test_tools(server: RunningServer) -> None:
    tool = FunctionTool.from_defaults(fn=add)
    assert model(server).predict_and_call([tool], CALL).response == "623"


def test_structured_output(server: RunningServer) -> None:
    llm = model(server, should_use_structured_outputs=True)
    answer = llm.structured_predict(Person, PromptTemplate("{text}"), text='{"name": "Ada", "age": 36}')
    assert answer == Person(name="Ada", age=36)


def test_the_model_itself(mini: RunningServer) -> None:
    answer = model(mini, temperature=0.0).chat([ChatMessage(role="user", content="What is 12 + 30?")])
    assert answer.message.content is not None and answer.message.content.endswith("42")
