"""Helpers of ``faults.py``: a server with the bundled model, its callers, and figures of the resources in use."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import ROOT, RunningServer, chat_body, wait_until

MODEL = ROOT / "weft" / "assets" / "weft-mini"
FLAGS = ("--cpu-cache-gib", "0.02", "--max-num-seqs", "16", "--max-model-len", "512", "--log-format", "json")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IDLE_WITHIN_S = 1.0
CONTROL = "What is 12 + 30?"

Figures = dict[str, Any]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""The C library's initial values, fixed: it would raise them with the largest block that was freed, and keep twice as
much of what is free. An engine's memory then goes up and down by 9 MiB, with fixed ones by one."""


@contextmanager
def serving(*flags: str) -> Iterator[RunningServer]:
    server = RunningServer(*FLAGS, *flags, module="weft", **ALLOCATOR)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def held(server: RunningServer) -> dict[str, float]:
    """Return the resources that requests hold: completions, pages, state slots, and the event loop's tasks."""
    text = server.client.get("/metrics").text
    gauge = {name: float(value) for name, value in re.findall(r"^([\w:]+)(?:\{.*?\})? (\S+)$", text, re.MULTILINE)}
    return {
        "completions": gauge["weft:open_completions"],
        "running": gauge["vllm:num_requests_running"],
        "waiting": gauge["vllm:num_requests_waiting"],
        "pages": gauge["weft:kv_pages"] - gauge["weft:kv_pages_free"] - gauge["weft:kv_pages_cached"],
        "slots": gauge["weft:state_slots"] - gauge["weft:state_slots_free"] - gauge["weft:state_slots_cached"],
        "tasks": gauge["weft:event_loop_tasks"],
    }


def settled(server: RunningServer, before: dict[str, float]) -> float:
    """Return the seconds until the server holds no more than ``before``. Assert that the wait is short, and that the
    server still answers."""
    try:
        seconds = wait_until(lambda: all(now <= before[name] for name, now in held(server).items()), IDLE_WITHIN_S)
    except AssertionError:
        raise AssertionError(f"{held(server)} is held, before: {before}") from None
    assert answer(server).endswith("42")
    return round(seconds, 3)


def answer(server: RunningServer) -> str:
    response = server.chat(CONTROL, temperature=0, max_tokens=40)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def memory_mib(pid: int) -> float:
    """Resident memory of a process that is not shared with files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) / 1024


@dataclass(slots=True)
class Reply:
    """A whole response. It ended after ``seconds``, at ``ended_at`` on the monotonic clock."""

    status: int
    head: str
    text: str
    seconds: float
    ended_at: float

    @property
    def finish_reasons(self) -> list[str]:
        return re.findall(r'"finish_reason":"(\w+)"', self.text)

    @property
    def error(self) -> Any:
        """The error event of a stream, which must be the last but [DONE]."""
        events = re.findall(r"^data: (.*)$", self.text, re.MULTILINE)
        assert events[-1] == "[DONE]", self.text[-300:]
        return json.loads(events[-2]).get("error")


def encoded(body: dict[str, Any], path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def connect(server: RunningServer) -> Connection:
    url = httpx.URL(server.url)
    return await asyncio.open_connection(url.host, url.port)


async def ask(
    server: RunningServer, body: dict[str, Any], path: str = CHAT, on_begin: Callable[[], object] = lambda: None
) -> Reply:
    """Send a request and read its response. ``on_begin`` is called at the first byte: a stream's comes with a token."""
    began = time.monotonic()
    reader, writer = await connect(server)
    writer.write(encoded(body, path))
    first = await reader.read(1)
    on_begin()
    head, _, text = (first + await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    now = time.monotonic()
    return Reply(int(head.split()[1]), head.decode(), text.decode(), now - began, now)


def story(number: int, **fields: Any) -> dict[str, Any]:
    """A streamed answer of a few dozen tokens; every number is another prompt."""
    return chat_body(f"Tell me about {number}.", stream=True, max_tokens=60, ignore_eos=True) | fields
