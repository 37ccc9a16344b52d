"""Callers that vanish at every stage, readers that never read, and hostile bodies: the server stays as it was."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.fake_engine import SLOW
from tests.server.running import RunningServer, chat_body, wait_until

NUM_ABORTS = 200
NUM_DEAF = 30

STREAM = json.dumps(chat_body("on and on", stream=True, priority=SLOW, ignore_eos=True)).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(STREAM)


def idle(server: RunningServer) -> bool:
    load = server.client.get("/load").json()
    return (load["server_load"], load["num_running"], load["num_waiting"]) == (0, 0, 0)


async def connect(server: RunningServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(server.url)
    return await asyncio.open_connection(url.host, url.port)


async def leave_at(server: RunningServer, stage: int, rng: random.Random) -> None:
    """Begin a stream and go: before the head, within it, within the body, at once after it, or while it streams."""
    reader, writer = await connect(server)
    whole = HEAD + STREAM
    sent = [0, rng.randrange(len(HEAD)), len(HEAD) + rng.randrange(len(STREAM)), len(whole), len(whole), len(whole)][
        stage
    ]
    writer.write(whole[:sent])
    await writer.drain()
    if stage == 4:
        await reader.readuntil(b"\n")
    if stage == 5:
        await asyncio.sleep(rng.random() * 0.1)
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


def test_callers_that_vanish_at_every_stage(server: RunningServer) -> None:
    rng = random.Random(1)

    async def main() -> None:
        for _ in range(NUM_ABORTS // 20):
            await asyncio.gather(*(leave_at(server, rng.randrange(6), rng) for _ in range(20)), return_exceptions=True)

    asyncio.run(main())
    wait_until(lambda: idle(server), 2.0)
    assert server.chat("still here").json()["choices"][0]["message"]["content"] == "still here"


def test_readers_that_never_read_cost_nobody_else(server: RunningServer) -> None:
    async def main() -> list[float]:
        connections = [await connect(server) for _ in range(NUM_DEAF)]
        for _, writer in connections:
            writer.write(HEAD + STREAM)
        await asyncio.sleep(0.5)
        seconds = []
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
            for _ in range(30):
                began = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                seconds.append(time.perf_counter() - began)
            answer = (await client.post("/v1/chat/completions", json=chat_body("quick"))).json()
            assert answer["choices"][0]["message"]["content"] == "quick"
        for _, writer in connections:
            writer.close()
        return seconds

    seconds = asyncio.run(main())
    assert sorted(seconds)[len(seconds) // 2] < 0.05
    wait_until(lambda: idle(server), 2.0)


HOSTILE: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 2**64, -(2**65), 1e308, 0.1, "", "x" * 3000, "\x00", "\ud83d", "{{ 7 * 7 }}",
    [], {},
    [[]], [None], [{}], {"": None}, [1] * 3000, ["a"] * 40, {"type": "json_schema", "json_schema": {}},
    {"type": "object"},
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": [{}]}], [{"role": []}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}], {"include_usage": 1},
    "(a+)+$", "[", "start: start", {"$ref": "#"}, {"enum": list(range(500))}, "required", {"function": {"name": 5}},
]  # fmt: skip
FIELDS = sorted({
    "messages", "prompt", "model", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "logit_bias",
    "seed",
    "frequency_penalty", "repetition_penalty", "stop", "max_tokens", "max_completion_tokens", "logprobs",
    "top_logprobs",
    "stream_options", "tools", "tool_choice", "response_format", "chat_template_kwargs", "echo", "bad_words",
    "min_tokens",
    "stop_token_ids", "allowed_token_ids", "prompt_logprobs", "priority", "request_id", "cache_salt", "guided_json",
    "guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "input", "instructions", "text", "system",
    "stop_sequences", "thinking", "return_token_ids", "continue_final_message", "add_generation_prompt", "metadata",
    "skip_special_tokens", "include_stop_str_in_output", "ignore_eos", "reasoning_effort", "tokens", "surprise",
})  # fmt: skip
USER = [{"role": "user", "content": "x"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"messages": USER},
    "/detokenize": {"tokens": [5]},
}


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(
    path=st.sampled_from(sorted(BASES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(HOSTILE), min_size=1, max_size=3),
    stream=st.booleans(),
)
def test_no_body_breaks_the_server(server: RunningServer, path: str, fields: dict[str, Any], stream: bool) -> None:
    body = BASES[path] | fields | ({"stream": True} if stream else {})
    content = json.dumps(body).encode()  # lone surrogates and all
    response = server.client.post(path, content=content)
    assert response.status_code < 500, (path, fields, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"], (path, fields)


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/v1/models/%00", "/v1/models/" + "a" * 3000, "/v1/models/..%2f..", "/%ff"]
)
def test_strange_paths(server: RunningServer, path: str) -> None:
    assert server.client.get(path).status_code in (400, 404)


def test_the_server_is_idle_and_answers_as_before(server: RunningServer) -> None:
    wait_until(lambda: idle(server), 2.0)
    assert server.chat("the same").json()["choices"][0]["message"]["content"] == "the same"
