"""The bundled model calls functions and writes objects by itself: what the server parses is real output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from openai import OpenAI

from demo import tools
from tests.patience import GUARD_S
from tests.server.running import RunningServer
from tests.whole import RUNS_LONG, takes_long

MODEL = "weft-mini"
RIGHT = 0.75
"""Share of exact answers; the wordings are those of the training."""
COUNT = 8 if RUNS_LONG else 4


def asked_for_calls() -> list[dict[str, Any]]:
    rng, rows = Random("calls"), []
    for _ in range(COUNT):
        offered = [tools.offer(tool, rng, invented=False) for tool in rng.sample(tools.TOOLS, 2)]
        question, message, *_ = tools.exchange(offered, rng)
        calls = [call["function"] for call in message["tool_calls"]]
        rows.append({"messages": [question], "tools": [each.schema for each in offered], "calls": calls})
    return rows


def asked_for_objects() -> list[tuple[str, Any]]:
    rng = Random("objects")
    answers = [tools.json_answer(rng, invented=False) for _ in range(COUNT)]
    return [(question, json.loads(answer)) for question, answer in answers]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(open_mini: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{open_mini.url}/v1", api_key="none", max_retries=0, timeout=GUARD_S) as client:
        yield client


def ask(client: OpenAI, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=200, **fields)


def called(message: Any) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    return [{"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in calls]


def test_calls_are_those_that_were_asked_for(client: OpenAI) -> None:
    right, rows = 0, asked_for_calls()
    with ThreadPoolExecutor(COUNT) as threads:
        answers = list(threads.map(lambda row: ask(client, row["messages"], tools=row["tools"]), rows))
    for row, answer in zip(rows, answers, strict=True):
        choice = answer.choices[0]
        if called(choice.message) == row["calls"]:
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            right += 1
    assert right >= RIGHT * COUNT


def test_a_call_arrives_in_a_stream(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    name, arguments, reason = "", "", None
    for chunk in ask(client, messages, tools=[WEATHER], stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Oslo"}, "tool_calls")


def test_the_result_of_a_call_becomes_an_answer(client: OpenAI) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Paris today?"}]
    message = ask(client, messages, tools=[WEATHER]).choices[0].message
    assert called(message) == [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"degrees": 31, "sky": "cloudy"}'}
    messages += [message.model_dump(exclude_none=True), result]
    choice = ask(client, messages, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "stop" and "31" in choice.message.content and "cloudy" in choice.message.content


def test_a_question_that_needs_no_function_gets_no_call(client: OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "Who are you?"}], tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.message.content


@takes_long
def test_objects_have_the_keys_and_values_that_were_asked_for(client: OpenAI) -> None:
    """Written freely, without a grammar."""
    right, rows = 0, asked_for_objects()
    with ThreadPoolExecutor(COUNT) as threads:
        answers = list(threads.map(lambda row: ask(client, [{"role": "user", "content": row[0]}]), rows))
    for (_, wanted), answer in zip(rows, answers, strict=True):
        text = answer.choices[0].message.content
        try:
            right += json.loads(text) == wanted
        except ValueError:
            continue
    assert right >= RIGHT * COUNT
