"""Faults at the server with the bundled model: ``python -m tests.server.faults [--scale X] [--json FILE]``.

Each function does one kind of harm, checks what callers see, waits until the server is as idle as before, and returns
figures. The counts apply to ``scale=1``. ``test_model_faults.py`` runs a fraction of most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from tests.patience import GUARD_S, stretched
from tests.server.fault_callers import (
    CHAT,
    COMPLETIONS,
    IDLE_WITHIN_S,
    MODEL,
    Figures,
    Reply,
    ask,
    connect,
    encoded,
    held,
    memory_mib,
    serving,
    settled,
    story,
)
from tests.server.process_faults import killed_engine, killed_server, stopped_engine, terminated
from tests.server.running import RunningServer, wait_until
from weft.bench import report

# -- aborts ----------------------------------------------------------------------------------------------------------


def _long(number: int, **fields: Any) -> dict[str, Any]:
    """An answer that would go on long after everything has to be idle again."""
    return story(number, max_tokens=400, **fields)


Leave = Callable[[RunningServer, int, random.Random], Awaitable[None]]


async def _cut_short(server: RunningServer, number: int, rng: random.Random) -> None:
    """Disconnect before the head, within the head, or within the body."""
    _, writer = await connect(server)
    whole = encoded(_long(number))
    writer.write(whole[: rng.choice([0, 20, rng.randrange(len(whole))])])
    await _go(writer, rng)


async def _go(writer: asyncio.StreamWriter, rng: random.Random) -> None:
    with suppress(OSError):
        await writer.drain()
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset, where closing says goodbye
    writer.close()


def _after(longest_s: float, make: Callable[[int], dict[str, Any]], path: str = CHAT) -> Leave:
    """Make a caller that disconnects at most ``longest_s`` after sending a request."""

    async def leave(server: RunningServer, number: int, rng: random.Random) -> None:
        _, writer = await connect(server)
        writer.write(encoded(make(number), path))
        await writer.drain()
        await asyncio.sleep(rng.random() * longest_s)
        await _go(writer, rng)

    return leave


def _on(sign: bytes, max_tokens: int) -> Leave:
    """Make a caller that disconnects as soon as the stream holds ``sign``."""

    async def leave(server: RunningServer, number: int, rng: random.Random) -> None:
        reader, writer = await connect(server)
        writer.write(encoded(story(number, max_tokens=max_tokens)))
        await reader.readuntil(sign)
        await _go(writer, rng)

    return leave


def _schema(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}
    return story(number, ignore_eos=False, response_format={"type": "json_schema", "json_schema": {"schema": schema}})


STAGES: dict[str, Leave] = {
    "while it is sent": _cut_short,
    "at once": _after(0.0, _long),
    "while it is rendered or waits": _after(0.02, _long),
    "in the prefill": _after(
        0.05, lambda i: {"prompt": f"{i} " * 100, "max_tokens": 200, "ignore_eos": True, "stream": True}, COMPLETIONS
    ),
    "at the first token": _on(b"data: ", 400),
    "while it streams": _after(0.5, _long),
    "before the whole answer": _after(0.3, lambda i: _long(i, stream=False)),
    "with several completions": _after(0.3, lambda i: _long(i, n=3)),
    "while its grammar compiles": _after(0.05, _schema),
    "at the end": _on(b'"finish_reason":"', 12),
}


def aborts(server: RunningServer, count: int) -> Figures:
    """Callers that leave at every stage of a request's life, 40 at a time."""
    before, rng = held(server), random.Random(1)

    async def main() -> None:
        for begin in range(0, count, 40):
            await asyncio.gather(*(_leave(server, i, rng) for i in range(begin, min(count, begin + 40))))

    asyncio.run(main())
    return {"aborts": count, "stages": list(STAGES), "idle_after_s": settled(server, before)}


async def _leave(server: RunningServer, number: int, rng: random.Random) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        await list(STAGES.values())[number % len(STAGES)](server, number, rng)


# -- readers that never read -----------------------------------------------------------------------------------------


def deaf_readers(count: int) -> Figures:
    """Open streams that nobody reads while other calls are served. The streams end by the time-out, or when the
    callers disconnect."""
    with serving("--request-timeout", "8") as server:
        before, memory = held(server), memory_mib(server.process.pid)
        figures = asyncio.run(_deaf(server, count))
        grown = memory_mib(server.process.pid) - memory
        return figures | {"server_memory_mib": round(grown, 1), "idle_after_s": settled(server, before)}


async def _deaf(server: RunningServer, count: int) -> Figures:
    connections = []
    for number in range(count):
        reader, writer = await connect(server)
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # nothing is taken from the socket
        writer.write(encoded(story(number, max_tokens=400, logprobs=True, top_logprobs=20)))
        connections.append(writer)
    seconds = []
    async with httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as client:
        for _ in range(100):
            began = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)
    seconds.sort()
    for writer in connections[: count // 2]:
        writer.transport.abort()
    for _ in range(150):  # the others are ended by the server
        if held(server)["completions"] == 0:
            break
        await asyncio.sleep(0.1)
    for writer in connections[count // 2 :]:
        writer.transport.abort()
    return {"readers": count, "health_p50_ms": _ms(seconds[50]), "health_p99_ms": _ms(seconds[98])}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


# -- too much --------------------------------------------------------------------------------------------------------


def overload(count: int) -> Figures:
    """Callers come at five times the rate at which they can be served: who does not fit is told so at once."""
    with serving("--max-queue-size", "34") as server:
        before = held(server)
        began = time.monotonic()
        asyncio.run(_many(server, ({"prompt": f"{i}", "max_tokens": 16, "ignore_eos": True} for i in range(100))))
        pause_s = (time.monotonic() - began) / 100 / 5

        async def caller(number: int) -> Reply:
            await asyncio.sleep(number * pause_s)
            return await ask(server, story(number, max_tokens=16))

        async def main() -> list[Reply]:
            return await asyncio.gather(*(caller(number) for number in range(count)))

        replies = asyncio.run(main())
        refused_s = sorted(reply.seconds for reply in replies if reply.status == 429)
        for reply in replies:
            assert reply.status in (200, 429), reply.text
            if reply.status == 200:
                assert reply.finish_reasons == ["length"] and "[DONE]" in reply.text
            else:
                assert "retry-after: 1" in reply.head.lower() and '"rate_limit_error"' in reply.text
        assert len(refused_s) > count / 4, f"{len(refused_s)} of {count} were refused"
        assert refused_s[len(refused_s) // 2] < stretched(0.1)
        return {
            "requests": count, "per_s": round(1 / pause_s, 1), "capacity": 50, "served": count - len(refused_s),
            "refused": len(refused_s), "refusal_p50_ms": _ms(refused_s[len(refused_s) // 2]),
            "refusal_p99_ms": _ms(refused_s[len(refused_s) * 99 // 100]), "idle_after_s": settled(server, before),
        }  # fmt: skip


def steady_memory(server: RunningServer, count: int, *, is_model: bool = True) -> Figures:
    """Send many different requests. The memory of server and engine must not grow once the cache is full.

    Allocators settle in the first part. A leak grows memory in every later part, whereas growth in a single part, for a
    moment or for good, is no leak. The reported growth is therefore the median growth of a later part, times two."""
    before, rng = held(server), random.Random(2)
    if is_model:
        asyncio.run(_many(server, (_small(rng, i) for i in _until_full(server))))
    sizes, began = [_memory(server)], time.monotonic()
    for _ in range(6):
        asyncio.run(_many(server, (_small(rng, i) for i in range(count // 6))))
        sizes.append(_memory(server))
    growth = {n: round(2 * median(b[n] - a[n] for a, b in pairwise(sizes[1:])), 1) for n in sizes[0]}
    assert growth["server"] < 2.0 and growth["engine"] < 3.0, sizes
    seconds = round(time.monotonic() - began, 1)
    idle = {"idle_after_s": settled(server, before)} if is_model else {}
    return {"requests": count, "seconds": seconds, "mib_by_part": sizes, "growth_mib": growth} | idle


def _until_full(server: RunningServer) -> Iterator[int]:
    """Numbers, until the cache has given up pages and states for newer ones."""
    for number in range(5000):
        if number % 100 == 99:
            text = server.client.get("/metrics").text
            if all(float(n) > 0 for n in re.findall(r"^weft:evicted_\w+_total\S* (\S+)$", text, re.MULTILINE)):
                return
        yield number
    raise AssertionError("the cache is still not full")


def _small(rng: random.Random, number: int) -> dict[str, Any]:
    fields = {"stream": number % 2 == 0, "max_tokens": 1 + (number % 4 == 0), "n": 1 + (number % 16 == 0)}
    return {"prompt": f"{rng.random():.6f}"} | fields


async def _many(server: RunningServer, bodies: Iterator[dict[str, Any]]) -> None:
    """Send them all, 24 at a time."""

    async def caller() -> None:
        for body in bodies:
            reply = await ask(server, body, COMPLETIONS)
            assert reply.status == 200, reply.text

    await asyncio.gather(*(caller() for _ in range(24)))


def _memory(server: RunningServer) -> dict[str, float]:
    return {
        "server": round(memory_mib(server.process.pid), 1),
        "engine": round(memory_mib(server.engine_pid), 1),
    }


# -- a model that breaks ---------------------------------------------------------------------------------------------


def not_a_number(count: int) -> Figures:
    """Token 7 has a NaN embedding: requests that hold it fail, alone, and nothing of them is cached."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(MODEL, Path(name) / "broken"))
        weights = load_file(folder / "model.safetensors")
        embedding = next(key for key in weights if key.endswith("embed_tokens.weight"))
        # The head gets weights of its own: a NaN there would reach every row.
        weights["lm_head.weight"] = weights[embedding].clone()
        weights[embedding][7] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
        with serving("--model", str(folder)) as server:
            return _not_a_number(server, count)


def _not_a_number(server: RunningServer, count: int) -> Figures:
    before = held(server)
    shared = [40 + i % 50 for i in range(100)]
    # A request that samples the broken token would break as well.
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logit_bias": {"7": -100}}
    good = [[*shared, 100 + i] for i in range(7)]
    bad = [*shared, 7, 7, 7]
    want = asyncio.run(_texts(server, good, fields))
    for number in range(count):
        prompts = [*good[:3], [*bad, 120 + number], *good[3:]]
        replies = asyncio.run(_replies(server, prompts, fields))
        failed = replies.pop(3)
        assert failed.status == 500 and '"model_error"' in failed.text, failed.text
        assert [json.loads(r.text)["choices"][0]["text"] for r in replies] == want
    # This request samples the broken token, so it fails after it has streamed a token.
    late = asyncio.run(_replies(server, [good[0]], fields | {"stream": True, "logit_bias": {"7": 100}}))[0]
    assert late.status == 200 and late.error["code"] == "model_error", late.text
    assert asyncio.run(_texts(server, good, fields)) == want
    seconds = _idle(server, before)
    reused = [line["cached_tokens"] for line in _log(server) if line.get("finish_reasons") == ["error"]]
    assert len(reused) == count + 1 and max(reused) <= len(shared) + 1, reused
    return {"broken": count + 1, "neighbours_unchanged": 7 * (count + 1),
            "most_tokens_reused_by_a_broken_one": max(reused),
            "shared_tokens": len(shared), "idle_after_s": seconds}  # fmt: skip


def _log(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log if line.startswith("{")]


def _idle(server: RunningServer, before: dict[str, float]) -> float:
    return round(wait_until(lambda: all(now <= before[k] for k, now in held(server).items()), IDLE_WITHIN_S), 3)


async def _replies(server: RunningServer, prompts: list[list[int]], fields: dict[str, Any]) -> list[Reply]:
    return await asyncio.gather(*(ask(server, {"prompt": prompt} | fields, COMPLETIONS) for prompt in prompts))


async def _texts(server: RunningServer, prompts: list[list[int]], fields: dict[str, Any]) -> list[str]:
    return [json.loads(r.text)["choices"][0]["text"] for r in await _replies(server, prompts, fields)]


# -- all of them -----------------------------------------------------------------------------------------------------


def run(scale: float) -> Iterator[tuple[str, Figures]]:
    """Every fault, with its name, one after the other."""
    with serving() as server:
        yield "aborts", aborts(server, round(2000 * scale))
        yield "stopped engine", stopped_engine(server)
        yield "steady memory", steady_memory(server, round(20_000 * scale))
    yield "readers that never read", deaf_readers(round(500 * scale))
    with serving("--restart-engine") as server:
        yield "killed engine", killed_engine(server, max(1, round(3 * scale)))  # a server gives up after more in a row
    yield "killed server", killed_server(max(1, round(5 * scale)))
    yield "SIGTERM under load", terminated(max(8, round(60 * scale)))
    yield "5x overload", overload(round(2500 * scale))
    yield "NaN in one row", not_a_number(max(1, round(10 * scale)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of the counts; default: 1")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    path = report.open_json(args.json)
    results = {}
    for name, figures in run(args.scale):
        print(name, json.dumps(figures), flush=True)
        results[name] = figures
    report.write_json(
        path, {"suite": "faults-server", "scale": args.scale} | report.provenance("cpu") | {"results": results}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
