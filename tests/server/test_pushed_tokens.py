"""A step's tokens go to the sockets of all its streams in one turn of the event loop; no reader's task runs for it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.token_cost import Client
from tests.patience import stretched
from tests.server.fake_engine import CAPACITY
from weft.assets import MODEL_DIR
from weft.config import resolve
from weft.engine import wire
from weft.server.app import build_app
from weft.server.service import Service
from weft.server.settings import ServerSettings
from weft.stats import EngineStats
from weft.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "one two three"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two three"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": CHAT},
    "/v1/messages": {"messages": CHAT},
}


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def stream_of(path: str, texts: list[bytes]) -> list[int]:
    """Run a streamed call that gets one token at a time, and append what is sent to the caller to ``texts``. Return the
    length of ``texts`` after the turn of the event loop that follows each token's message."""
    client: Any = Client()
    service = Service(ServerSettings(), client)
    app = build_app(service)
    service.start()
    for message in (wire.Configured(resolve(device="cpu")), wire.Ready(CAPACITY)):
        client.hear(message)
    await service.became_ready.wait()
    body = json.dumps(BODIES[path] | {"max_tokens": 40, "stream": True}).encode()
    body = body.replace(b"max_tokens", b"max_output_tokens") if "responses" in path else body

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        texts.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("1", 1)}
    scope |= {"weft.is_complete": True, "weft.on_disconnect": lambda call: None}
    scope |= {"weft.chunks": SimpleNamespace(is_free=True, write=texts.append)}
    call = asyncio.create_task(app(scope, receive, send))
    while not client.requests:
        await asyncio.sleep(0.001)
    counts = []
    for index in range(6):
        reason = "stop" if index == 5 else None
        update = wire.Update(client.requests[0].request_id, [308], reason, None, 0, 1.0, 1.0)
        client.hear(wire.decode_from_engine(wire.encode(wire.Outputs([update], EngineStats()))))
        await asyncio.sleep(0)  # a reader that is woken now runs in the next turn
        counts.append(len(texts))
        await turns()
    await asyncio.wait_for(call, stretched(10))
    return counts


@pytest.mark.parametrize("path", BODIES)
def test_tokens_are_written_without_the_reader(path: str) -> None:
    texts: list[bytes] = []
    counts = asyncio.run(stream_of(path, texts))
    begun = counts[1]  # the first token goes out with the head, in the reader's task
    assert counts[2:5] == [begun + 1, begun + 2, begun + 3], "a write for a token"
    assert counts[5] == counts[4] and len(texts) > counts[5], "the end is the reader's"
    if "completions" in path:
        assert b"".join(texts).count(Tokenizer.load(MODEL_DIR).decode([308]).encode()) == 6, "and comes once"
