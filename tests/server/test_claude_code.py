"""Send the first calls of Claude Code, in their wire form, to a server whose context is long enough for them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.server import claude_code
from tests.server.running import RunningServer
from tests.whole import takes_long


@pytest.fixture(scope="module")
def long_server() -> Iterator[RunningServer]:
    running = RunningServer("--strict", WEFT_FAKE_CONTEXT="131072")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@takes_long
def test_first_calls(long_server: RunningServer) -> None:
    post = long_server.client.post
    quota = post(claude_code.PATH, json=claude_code.quota_call(), headers=claude_code.HEADERS)
    assert quota.status_code == 200 and quota.json()["usage"]["output_tokens"] == 1

    call = claude_code.main_call()
    streamed = post(claude_code.PATH, json=call, headers=claude_code.HEADERS)
    assert streamed.status_code == 200, streamed.text
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
    assert text == "one two three" and events[-1]["type"] == "message_stop"
    prompt_tokens = events[0]["message"]["usage"]["input_tokens"]
    assert prompt_tokens > 41_000

    counting = {name: call[name] for name in ("model", "system", "messages", "tools", "thinking")}
    counted = post("/v1/messages/count_tokens?beta=true", json=counting, headers=claude_code.HEADERS)
    assert counted.status_code == 200 and counted.json()["input_tokens"] == prompt_tokens
