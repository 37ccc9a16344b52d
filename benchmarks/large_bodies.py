"""How long large requests keep a server's other callers waiting: ``python -m benchmarks.large_bodies --json FILE``.

A server over an engine without a model gets one large request at a time (``four_8mb_prompts``: four at once), while a
client asks for ``/health`` every 5 ms. ``pause_ms`` is the longest time by which the event loop was late, measured in
the server; ``health_ms`` is what the client saw. Both include waiting for a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import RunningServer
from weft.bench import report
from weft.platforms.cpu import cpu_name

LAG_FILE = "WEFT_LAG_FILE"
NUM_IDS = 1_500_000
TEXT = "word and, more 'words' \n" * 330_000
"""Close to the limit of 8 MiB."""


def messages(count: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(count)]


def scenarios() -> dict[str, tuple[str, dict[str, Any], int]]:
    """Path, body and number of equal requests at once."""
    ids = [100 + i % 1000 for i in range(NUM_IDS)]
    chat, user = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    return {
        "200k_messages": (chat, {"messages": messages(200_000)}, 1),
        "16k_messages": (chat, {"messages": messages(16_000)}, 1),
        "60k_tools": (chat, {"messages": user, "tools": [tool] * 60_000}, 1),
        "1m_stops": (chat, {"messages": user, "stop": ["a"] * 1_000_000}, 1),
        "tokenize_8mb": ("/tokenize", {"prompt": TEXT}, 1),
        "tokenize_8mb_strings": ("/tokenize", {"prompt": TEXT[:1_000_000], "return_token_strs": True}, 1),
        "detokenize_1500k_ids": ("/detokenize", {"tokens": ids}, 1),
        "prompt_of_1500k_ids": ("/v1/completions", {"prompt": ids}, 1),
        "four_8mb_prompts": (chat, {"messages": [{"role": "user", "content": TEXT}]}, 4),
    }


async def measure(url: str, path: str, body: bytes, count: int, lag: mmap.mmap) -> dict[str, Any]:
    """Send the body while another connection asks for the server's health."""
    seen: list[float] = []
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=300) as caller, httpx.AsyncClient(base_url=url) as other:
        await other.get("/health")

        async def ask() -> None:
            while True:
                began = time.perf_counter()
                await other.get("/health", timeout=60)
                seen.append(time.perf_counter() - began)
                await asyncio.sleep(0.005)

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.2)
        lag[:8] = bytes(8)
        began = time.perf_counter()
        answers = await asyncio.gather(*(caller.post(path, content=body, headers=headers) for _ in range(count)))
        seconds = time.perf_counter() - began
        await asyncio.sleep(0.3)
        asking.cancel()
    seen.sort()
    return {
        "status": sorted({answer.status_code for answer in answers}),
        "seconds": round(seconds, 2),
        "pause_ms": round(1e3 * struct.unpack("<d", lag[:8])[0], 1),
        "health_ms": {"p99": round(1e3 * seen[int(0.99 * len(seen))], 1), "max": round(1e3 * seen[-1], 1)},
    }


def serve() -> None:
    """The server, with a task that notes by how much the event loop is late."""
    from weft.server import http_server, main

    plain = http_server.serve_http
    with open(os.environ[LAG_FILE], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 8)

    async def watch() -> None:
        while True:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            late = time.monotonic() - due
            if late > struct.unpack("<d", memory[:8])[0]:
                memory[:8] = struct.pack("<d", late)

    async def watched(*args: Any, **named: Any) -> None:
        watching = asyncio.create_task(watch())
        await plain(*args, **named)
        watching.cancel()

    main.serve_http = watched
    from tests.server import fake_server

    fake_server.run(sys.argv[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of requests")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = {}
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        server = RunningServer(module="benchmarks.large_bodies", **{LAG_FILE: file.name}).wait_ready()
        lag = mmap.mmap(file.fileno(), 8)
        for name, (path, body, count) in scenarios().items():
            if args.only and name not in args.only:
                continue
            content = json.dumps(body).encode()
            found[name] = asyncio.run(measure(server.url, path, content, count, lag)) | {"bytes": len(content)}
            print(name, json.dumps(found[name]), flush=True)
        server.close()
    figures = {"processor": f"{cpu_name()}, {os.cpu_count()} processors", "load_average": os.getloadavg()[0]}
    figures |= report.origin() | {"requests": found}
    if args.json:
        report.write_json(Path(args.json), figures)


if __name__ == "__main__":
    serve() if "--port" in sys.argv else main()
