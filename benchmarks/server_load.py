"""The server alone under load: an engine that answers at once, and a client that does next to nothing.

    python -m benchmarks.server_load --json benchmarks/results/server-load-cpu.json

The figures:

- streamed chats per second, of 16 tokens each, and the processor time of server, engine and client;
- the time of a token from the engine's step to the client, with 64 streams that get a token every 10 ms;
- the time of a ``/health`` request meanwhile.

All processes run on the machine that measures, so they share its processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from tests.server.fake_engine import CUT, SLOW
from weft.bench import report
from weft.platforms.cpu import cpu_name
from weft.processes.liveness import processor_s

NUM_TOKENS = 16
QUESTION = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
_TOKEN_IDS = re.compile(rb'"token_ids":\[([^\]]+)')
END_OF_CHUNKED = b"0\r\n\r\n"


class Server:
    """The server over the instant engine, as processes of its own; ``server`` counts all that are not the engine."""

    def __init__(self, step_times: Path, api_server_count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.server_load", "--serve"]
        command += ["--api-server-count", str(api_server_count)] if api_server_count > 1 else []
        env = os.environ | {"OMP_NUM_THREADS": "1", "WEFT_STEP_TIMES": str(step_times)}
        log = step_times.with_suffix(".log")
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, env=env)
        while "\n  ready" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.05)
        found = re.search(r"http://[\d.]+:(\d+)", log.read_text())
        assert found is not None
        self.port = int(found[1])
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        children = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
        engines = [pid for pid, what in children.items() if "instant_engine" in what]
        apis = [pid for pid, what in children.items() if "api_process" in what]
        self.pids = {"server": [self.process.pid, *apis], "engine": engines, "client": [os.getpid()]}

    def processor_s(self) -> dict[str, float]:
        return {name: sum(map(processor_s, pids)) for name, pids in self.pids.items()}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def request(priority: int, num_tokens: int, **fields: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": num_tokens, "stream": True}
    content = json.dumps(body | {"priority": priority} | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


class Stream(asyncio.Protocol):
    """One connection that sends requests in turn. ``arrivals``: the moment of each token that comes with its ID."""

    def __init__(self, content: bytes, count: int) -> None:
        self.content, self.left = content, count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrivals: list[float] = []
        self.received = self.num_events = 0
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.content)

    def data_received(self, data: bytes) -> None:
        if b"token_ids" in data:
            now = time.monotonic()
            self.arrivals += [now] * sum(ids.count(b",") + 1 for ids in _TOKEN_IDS.findall(data))
        self.num_events += data.count(b"data: ")
        self.received += len(data)
        self.tail = (self.tail + data)[-64:]
        if not self.tail.endswith(END_OF_CHUNKED):
            return
        self.tail = b""
        self.left -= 1
        if self.left:
            self.transport.write(self.content)
        else:
            self.transport.close()
            self.done.set_result(None)


async def open_stream(port: int, content: bytes, each: int) -> Stream:
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(lambda: Stream(content, each), "127.0.0.1", port))[1]


async def open_streams(port: int, count: int, content: bytes, each: int) -> list[Stream]:
    return [await open_stream(port, content, each) for _ in range(count)]


async def throughput(server: Server, connections: int, seconds: float) -> dict[str, Any]:
    """Streamed chats per second, after a short warm-up."""
    content = request(CUT, NUM_TOKENS)
    warm = await open_streams(server.port, connections, content, 10)
    began = time.monotonic()
    await asyncio.gather(*(stream.done for stream in warm))
    each = max(10, int(10 * seconds / (time.monotonic() - began)))
    used, began = server.processor_s(), time.monotonic()
    streams = await open_streams(server.port, connections, content, each)
    await asyncio.gather(*(stream.done for stream in streams))
    wall = time.monotonic() - began
    chats = connections * each
    spent = {name: after - used[name] for name, after in server.processor_s().items()}
    return {
        "connections": connections,
        "chats": chats,
        "chats_per_s": round(chats / wall, 1),
        "events_per_chat": round(sum(s.num_events for s in streams) / chats, 2),
        "processor_us_per_chat": {name: round(value / chats * 1e6) for name, value in spent.items()},
        "processors_used": round(sum(spent.values()) / wall, 2),
    }


async def latency(server: Server, step_times: Path, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Milliseconds from the end of a step to the token at the client, and of ``/health`` meanwhile."""
    used, began = server.processor_s(), time.monotonic()
    contents = [request(SLOW, num_tokens, request_id=str(i), return_token_ids=True) for i in range(num_streams)]
    streams = [await open_stream(server.port, content, 1) for content in contents]
    health: list[float] = []
    looking = asyncio.create_task(_watch_health(server.port, health))
    await asyncio.gather(*(stream.done for stream in streams))
    looking.cancel()
    spent = {name: after - used[name] for name, after in server.processor_s().items()}
    wall = time.monotonic() - began
    await asyncio.to_thread(server.stop)
    told = json.loads(step_times.read_text())
    moments, first_steps = told["moments"], told["first_steps"]
    added = [
        at - moments[first_steps[f"chatcmpl-{i}"] + k]  # a stream has a token of every step from its first one on
        for i, stream in enumerate(streams)
        for k, at in enumerate(stream.arrivals)
    ]
    assert len(added) == num_streams * num_tokens
    return {
        "streams": num_streams,
        "tokens": len(added),
        "chunks": sum(stream.num_events - 1 for stream in streams),  # all but [DONE]
        "added_ms": _percentiles(added),
        "health_ms": _percentiles(health),
        "processors_used": {name: round(value / wall, 3) for name, value in spent.items()},
    }


async def _watch_health(port: int, seconds: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
        assert b" 200 " in head
        seconds.append(time.monotonic() - began)
        await asyncio.sleep(0.005)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    return {name: round(ordered[int(len(ordered) * share)] * 1000, 3) for name, share in shares.items()} | {
        "max": round(ordered[-1] * 1000, 3)
    }


def serve(api_server_count: int) -> int:
    from weft.server.main import serve
    from weft.server.settings import ServerSettings

    engine = {"device": "cpu"}
    count: dict[str, Any] = (
        {"api_server_count": api_server_count} if api_server_count > 1 else {}
    )  # an older tree knows no such setting
    return serve(
        ServerSettings(port=0, max_queue_size=4096, **count), engine, engine_module="benchmarks.instant_engine"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--api-server-count", type=int, default=1, metavar="N", help="API processes before the engine")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of the throughput run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=500, help="per stream of the latency run")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.serve:
        return serve(args.api_server_count)
    with tempfile.TemporaryDirectory() as folder:
        figures = run(args, Path(folder) / "steps.json")
    machine = {"processor": cpu_name(), "processors": os.cpu_count(), "load_average": os.getloadavg()[0]}
    figures = machine | report.origin() | figures
    print(json.dumps(figures, indent=2))
    if args.json:
        report.write_json(report.open_json(args.json), figures)
    return 0


def run(args: argparse.Namespace, step_times: Path) -> dict[str, Any]:
    server = Server(step_times, args.api_server_count)
    try:
        rates = [uvloop.run(throughput(server, args.connections, args.seconds)) for _ in range(args.repeats)]
    finally:
        server.stop()
    server = Server(step_times, args.api_server_count)
    try:
        delays = uvloop.run(latency(server, step_times, args.connections, args.tokens))
    finally:
        server.stop()
    return {"api_server_count": args.api_server_count, "throughput": rates, "latency": delays}


if __name__ == "__main__":
    sys.exit(main())
