"""Callers that vanish at every stage and readers that never read: the server stays as it was."""

from __future__ import annotations

import asyncio
import json
import random
import time

import httpx

from tests.patience import GUARD_S, stretched
from tests.server.fake_engine import SLOW
from tests.server.running import RunningServer, chat_body, wait_until

NUM_ABORTS = 200
NUM_DEAF = 40

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
        async with httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as client:
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
    assert sorted(seconds)[len(seconds) // 2] < stretched(0.05)
    wait_until(lambda: idle(server), 2.0)


def test_the_server_is_idle_and_answers_as_before(server: RunningServer) -> None:
    wait_until(lambda: idle(server), 2.0)
    assert server.chat("the same").json()["choices"][0]["message"]["content"] == "the same"
