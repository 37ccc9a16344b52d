"""The bundled model behind a real server, through the official client."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI

from tests.patience import GUARD_S
from tests.server.running import RunningServer
from tests.whole import takes_long, unless_long

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("record", "report")
]
QUESTION = "What is 12 + 30?"
CORRUPTED = "vllm:corrupted_requests_total"


@pytest.fixture
def client(open_mini: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{open_mini.url}/v1", api_key="none", max_retries=0, timeout=GUARD_S) as client:
        yield client


def ask(client: OpenAI, text: str = QUESTION, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 60} | fields
    return client.chat.completions.create(model="weft-mini", messages=[{"role": "user", "content": text}], **fields)


def test_another_question_reuses_the_system_block(client: OpenAI) -> None:
    """Prompts diverge at the end of the system block. The cache keeps a state there without being asked."""
    system = {"role": "system", "content": "Whatever is asked, answer in one short sentence with a number in it."}
    found = []
    for question in ("What is 3 + 4?", "Is 11 a prime?"):
        messages: list[Any] = [system, {"role": "user", "content": question}]
        answer = client.chat.completions.create(model="weft-mini", messages=messages, max_tokens=2)
        found.append(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
    assert found[0] == 0 and found[1] > 10


def test_states_are_kept_where_a_request_says(client: OpenAI) -> None:
    """``checkpoint_positions``, of a prompt in token ids and of a conversation."""
    rng = random.Random(3)
    prompt = [rng.randrange(300, 1800) for _ in range(90)]
    for at in (33, 70):
        given = {"checkpoint_positions": [at], "cache_salt": f"at {at}"}
        client.completions.create(model="weft-mini", prompt=prompt, max_tokens=1, extra_body=given)
        other = client.completions.create(
            model="weft-mini", prompt=[*prompt[:at], 5, 6, 7], max_tokens=1, extra_body={"cache_salt": f"at {at}"}
        )
        assert other.usage.prompt_tokens_details.cached_tokens == at  # type: ignore[union-attr]
    for wrong in ([91], [0], ["x"]):
        with pytest.raises(BadRequestError, match="checkpoint_positions"):
            client.completions.create(
                model="weft-mini", prompt=prompt, max_tokens=1, extra_body={"checkpoint_positions": wrong}
            )
    words = " ".join(f"word{i}" for i in range(40))
    ask(client, words, max_tokens=1, extra_body={"checkpoint_positions": [50], "cache_salt": "chat"})
    again = ask(client, words[:-30] + " and more", max_tokens=1, extra_body={"cache_salt": "chat"})
    assert again.usage.prompt_tokens_details.cached_tokens >= 50


def test_it_answers_and_the_second_time_from_the_cache(client: OpenAI) -> None:
    first = ask(client)
    assert first.choices[0].message.content.endswith("42") and first.choices[0].finish_reason == "stop"
    second = ask(client)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert "KV matched" in second.model_extra["weft"]["prompts"][0]["cache"]
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True))
    assert streamed == first.choices[0].message.content


def test_many_at_once(open_mini: RunningServer) -> None:
    import asyncio

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{open_mini.url}/v1", api_key="none", timeout=GUARD_S) as client:
            calls = [
                client.completions.create(model="weft-mini", prompt=f"{i} + 1 =", max_tokens=8, temperature=0)
                for i in range(40)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    together = asyncio.run(main())
    body = {"prompt": "7 + 1 =", "max_tokens": 8, "temperature": 0}
    assert open_mini.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == together[7]


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, 0),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, 1.5),
        ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, 1.5),
    ],
)
def test_json_schema(client: OpenAI, fields: dict[str, Any], temperature: float) -> None:
    text = ask(client, temperature=temperature, max_tokens=200, seed=1, **fields).choices[0].message.content
    value = json.loads(text)
    assert isinstance(value["answer"], int) and isinstance(value["sure"], bool) and len(value) == 2


def test_schemas_of_other_protocols(open_mini: RunningServer, client: OpenAI) -> None:
    from tests.server.claude_code import HEADERS, PATH, title_call

    body = title_call() | {"stream": False, "temperature": 0, "max_tokens": 60}
    message = open_mini.client.post(PATH, json=body, headers=HEADERS).json()
    if message["stop_reason"] == "end_turn":
        assert set(json.loads(message["content"][0]["text"])) == {"title"}
    assert message["content"][0]["text"].lstrip().startswith("{")
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model="weft-mini", input=QUESTION, text=text, max_output_tokens=200)
    assert isinstance(json.loads(answer.output_text)["answer"], int)


def test_other_constraints(client: OpenAI) -> None:
    def constrained(**fields: Any) -> str:
        return ask(client, extra_body=fields, temperature=1.2, seed=3).choices[0].message.content

    assert constrained(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
    assert constrained(guided_choice=['a "b"\n', "ü"]) in ('a "b"\n', "ü")
    digits = constrained(structured_outputs={"regex": "[0-9]{3}/[a-c]"})
    assert len(digits) == 5 and digits[:3].isdigit() and digits[3:] in ("/a", "/b", "/c")
    assert constrained(structured_outputs={"grammar": 'start: "x" start? | "y"'}).rstrip("x") in ("", "y")
    whole = ask(client, response_format={"type": "json_object"}, max_tokens=150, temperature=1, seed=2)
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)


def test_options_that_leave_no_token(client: OpenAI, open_mini: RunningServer) -> None:
    fields = {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}
    message = "after 0 generated tokens, the structured output and bad_words leave no token"
    with pytest.raises(BadRequestError, match=message):
        ask(client, extra_body=fields)
    with pytest.raises(APIError, match=message):
        list(ask(client, extra_body=fields, stream=True))
    (broken,) = (
        line for line in open_mini.client.get("/metrics").text.splitlines() if line.startswith(f"{CORRUPTED}{{")
    )
    assert broken.endswith(" 0.0"), "neither the model nor its step broke"


def test_constrained_and_free_requests_share_steps(client: OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    answer = ask(client, n=4, seed=5, temperature=1.0, extra_body={"guided_choice": ["yes", "no", "perhaps"]})
    assert {c.message.content for c in answer.choices} <= {"yes", "no", "perhaps"}
    assert ask(client).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"guided_json": {"type": "strange"}}, "strange"),
        ({"guided_json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
        ({"guided_regex": "a(?=b)"}, "look-around"),
        pytest.param({"guided_json": {"enum": ["x" * 300_000]}}, "bytes", marks=takes_long),
        ({"guided_choice": []}, "option"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "exclude"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"jsn": 1}}, "jsn"),
    ],
)
def test_constraints_that_are_refused(client: OpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        ask(client, extra_body=fields)


@pytest.mark.parametrize("stream", unless_long([True], [False, True]))
def test_forced_tool_calls(client: OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "report"}}
    for choice, names in ((named, {"report"}), ("required", {"record", "report"})):
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        fields["response_format"] = {"type": "json_object"}  # of the content, which a forced call does not have
        answer = ask(client, max_tokens=300, stream=stream, **fields)
        if stream:
            chunks = list(answer)
            calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            message = answer.choices[0].message
            calls, content, reason = message.tool_calls, message.content or "", answer.choices[0].finish_reason
        assert len(calls) == 1 and calls[0].function.name in names and content == "" and reason == "tool_calls"
        assert set(json.loads(calls[0].function.arguments)) == {"answer", "sure"}
