"""The OpenAI Agents SDK: an agent that calls a function and reads its result, over both of OpenAI's protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.server.running import RunningServer
from tests.whole import takes_long

pytest.importorskip("agents", reason="openai-agents is not installed")
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)

PROTOCOLS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 348, "b": 275}}\n</tool_call>'
UNICODE = "Grüße aus 東京 😀👩‍👩‍👧 ok"

Result = TypeVar("Result")
Protocol = Callable[[str, AsyncOpenAI], Model]


@function_tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return f"sum={a + b}"


class Person(BaseModel):
    name: str
    age: int


def run(server: RunningServer, protocol: Protocol, use: Callable[[Model], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await use(protocol(MODEL, client))

    return asyncio.run(main())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_agent_calls_a_function_and_reads_its_result(server: RunningServer, protocol: Protocol) -> None:
    async def use(model: Model) -> Any:
        agent = Agent(name="adder", instructions="Be exact.", model=model, tools=[add])
        return await Runner.run(agent, CALL, max_turns=3)

    result = run(server, protocol, use)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert "sum=623" in result.final_output
    assert result.context_wrapper.usage.requests == 2 and result.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("text", [UNICODE, CALL])
def test_streamed_text_adds_up(server: RunningServer, protocol: Protocol, text: str) -> None:
    async def use(model: Model) -> tuple[str, Any]:
        agent = Agent(name="echo", model=model, tools=[add], model_settings=ModelSettings(include_usage=True))
        result = Runner.run_streamed(agent, text, max_turns=3)
        deltas = []
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                deltas.append(event.data.delta)
        return "".join(deltas), result

    streamed, result = run(server, protocol, use)
    assert streamed == result.final_output
    assert result.final_output == UNICODE if text == UNICODE else "sum=623" in result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_output_type(server: RunningServer, protocol: Protocol) -> None:
    async def use(model: Model) -> Any:
        agent = Agent(name="reader", model=model, output_type=Person)
        return await Runner.run(agent, '{"name": "Ada", "age": 36}')

    assert run(server, protocol, use).final_output == Person(name="Ada", age=36)


def test_a_handoff(server: RunningServer) -> None:
    async def use(model: Model) -> Any:
        second = Agent(name="second", model=model)
        first = Agent(name="first", model=model, handoffs=[second])
        call = '<tool_call>\n{"name": "transfer_to_second", "arguments": {}}\n</tool_call>'
        return await Runner.run(first, call, max_turns=3)

    assert run(server, OpenAIChatCompletionsModel, use).last_agent.name == "second"


@takes_long
def test_the_bundled_model_calls_a_function_by_itself(mini: RunningServer) -> None:
    asked = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return '{"degrees": 31, "sky": "cloudy"}'

    async def use(model: Model) -> Any:
        agent = Agent(name="w", model=model, tools=[get_weather], model_settings=ModelSettings(temperature=0))
        return await Runner.run(agent, "What is the weather in Oslo?", max_turns=3)

    answer = run(mini, OpenAIChatCompletionsModel, use).final_output
    assert asked == ["Oslo"] and "31" in answer and "cloudy" in answer
