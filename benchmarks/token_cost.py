"""Processor time that the server spends on one token of a streamed chat: engine message to encoded chunk.

    python -m benchmarks.token_cost before=DIR now=. --json benchmarks/results/token-cost-cpu.json

64 streams get a token each in every message, in one thread, without sockets. The trees are run in turn; of each run the
fastest ten steps in a row count, and of all runs the median.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from weft.bench import report
from weft.platforms.cpu import cpu_name

STREAMS, STEPS = 64, 300
QUESTION = "one two three four five six seven eight nine ten eleven twelve"


class Client:
    """Stands for the engine process. ``requests``: what it has been sent."""

    num_restarts, silence_s, replicas, pid = 0, 0.0, None, 1

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def listen(self, hear: Any, lost: Any) -> None:
        self.hear = hear

    def start(self) -> None: ...

    def send(self, message: Any) -> None:
        if hasattr(message, "prompt_token_ids"):
            self.requests.append(message)


async def measure() -> float:
    """Microseconds per token."""
    from tests.server.fake_engine import CAPACITY
    from weft.config import resolve
    from weft.engine import wire
    from weft.server.app import build_app
    from weft.server.service import Service
    from weft.server.settings import ServerSettings
    from weft.stats import EngineStats

    client: Any = Client()
    service = Service(ServerSettings(max_queue_size=4096), client)
    app = build_app(service)
    service.start()
    for message in (wire.Configured(resolve(device="cpu")), wire.Ready(CAPACITY)):
        client.hear(message)
    await service.became_ready.wait()
    fields = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3500, "stream": True}
    body, num_chunks = json.dumps(fields).encode(), 0

    def write(content: bytes) -> bool:
        nonlocal num_chunks
        num_chunks += 1
        return True

    async def call() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            write(b"")

        headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        scope |= {"weft.is_complete": True, "weft.on_disconnect": lambda call: None, "client": ("1", 1)}
        scope |= {"weft.chunks": SimpleNamespace(is_free=True, write=write), "weft.write_chunk": write}  # now, before
        await app(scope, receive, send)

    calls = [asyncio.create_task(call()) for _ in range(STREAMS)]
    while len(client.requests) < STREAMS:
        await asyncio.sleep(0)
    updates = [wire.Update(r.request_id, [308], None, None, 0, 1.0, 1.0) for r in client.requests]
    content, best = wire.encode(wire.Outputs(updates, EngineStats())), float("inf")
    for _ in range(STEPS // 10):
        began = time.process_time()
        for _ in range(10):
            wanted = num_chunks + STREAMS
            client.hear(wire.decode_from_engine(content))
            while num_chunks < wanted:
                await asyncio.sleep(0)
        best = min(best, time.process_time() - began)
    for each in calls:
        each.cancel()
    return best / 10 / STREAMS * 1e6


def run_here() -> None:
    import uvloop

    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(10_000)

    async def main() -> None:
        print(round(await measure(), 3), flush=True)
        os._exit(0)  # nothing here is worth an orderly end

    uvloop.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="LABEL=TREE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    runs: dict[str, list[float]] = {tree.partition("=")[0]: [] for tree in args.trees}
    for _ in range(args.rounds):
        for tree in args.trees:
            label, _, folder = tree.partition("=")
            env = os.environ | {"PYTHONPATH": str(Path(folder).resolve()), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(Path(__file__).resolve()), "--here"]
            out = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout
            runs[label].append(float(out))
    medians = {label: round(statistics.median(several), 2) for label, several in runs.items()}
    figures = {"processor": cpu_name(), "load_average": os.getloadavg()[0]} | report.origin()
    figures |= {"streams": STREAMS, "us_per_token": medians, "runs": runs}
    print(json.dumps(figures["us_per_token"]))
    if args.json:
        report.write_json(report.open_json(args.json), figures)


if __name__ == "__main__":
    run_here() if "--here" in sys.argv else main()
