"""One of several API processes before one engine: ``python -m weft.server.api_process``, started by the main process.

Job: the same server as ``main.py`` runs alone, over an engine that the main process keeps. Owns: this process's life.
Does not know: the other API processes.

It outlives nobody: the kernel kills it when its parent dies. It ignores the signals that ask a service to end, because
the main process gets them too and then says ``Drain``.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import uvloop

from weft.engine import wire
from weft.engine.snapshot import ReplicaView
from weft.engine.supervisor import OnLost, OnMessage
from weft.processes.lifeline import die_with_parent, leave_signals_to_parent
from weft.processes.log_writer import LogWriter
from weft.server import api_link as link
from weft.server.admission import OpenCounts
from weft.server.http_server import make_tracer, serve_http
from weft.server.requestlog import configure as configure_log
from weft.server.service import Service

if TYPE_CHECKING:
    from weft.server.tracing import Tracer


class RemoteEngine:
    """The engine and the other API processes, behind the main process: an ``EngineClient``, and ``ApiProcesses``.

    Attributes:
        drain: called when the server is to leave.
        lost: called when the main process has gone, or a message of it could not be handled.
    """

    def __init__(self, start: link.ApiStart) -> None:
        self._on_message: OnMessage = lambda message: None
        self._on_lost: OnLost = lambda failure, is_restarting: None
        self._socket = socket.socket(fileno=start.link_fd)
        self._frames = link.Frames(self._receive, lambda: self.lost())
        self._pulse = link.Pulse(None, None, 0, None)
        self._pulse_at = time.monotonic()
        self._gathers: dict[int, asyncio.Future[list[bytes]]] = {}
        self._is_open = asyncio.Event()
        self._numbers = itertools.count()
        self._connecting: asyncio.Task[object] | None = None
        self._report: Callable[[str], bytes] = lambda what: b""
        self.drain: Callable[[], None] = lambda: None
        self.lost: Callable[[], None] = lambda: None

    def listen(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._on_message, self._on_lost = on_message, on_lost

    def offer(self, report: Callable[[str], bytes]) -> None:
        self._report = report

    @property
    def num_restarts(self) -> int:
        return self._pulse.num_restarts

    @property
    def pid(self) -> int | None:
        return self._pulse.pid

    @property
    def silence_s(self) -> float:
        """The main process may stand still as well."""
        if self._pulse.silence_s is None:
            return float("inf")
        return self._pulse.silence_s + time.monotonic() - self._pulse_at

    @property
    def replicas(self) -> list[ReplicaView] | None:
        return self._pulse.replicas

    def start(self) -> None:
        """Begin to listen; the engine starts by itself."""
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(loop.create_connection(lambda: self._frames, sock=self._socket))

    def send(self, message: wire.ToEngine | link.FromApi) -> None:
        self._frames.send(message)

    def fail(self, failure: wire.Failed) -> None:
        self.send(link.Unfit(failure))

    def no_restart(self) -> None:
        """The main process knows."""

    async def stop(self, grace_s: float) -> None:
        self._frames.close()

    async def ready(self) -> None:
        self._is_open.clear()
        self.send(link.Serving())
        await self._is_open.wait()

    async def gather(self, what: str) -> list[bytes]:
        number = next(self._numbers)
        pending = self._gathers[number] = asyncio.get_running_loop().create_future()
        self.send(link.Gather(number, what))
        return await pending

    def _receive(self, content: bytes) -> None:
        message = link.decode_to_api(content)
        match message:
            case wire.Outputs() | wire.Configured() | wire.Ready() | wire.Inspected() | wire.Controlled():
                self._on_message(message)
            case link.Pulse():
                self._pulse, self._pulse_at = message, time.monotonic()
            case link.Lost():
                self._on_lost(message.failure, message.is_restarting)
            case link.Report():
                self.send(link.Reported(message.number, self._report(message.what)))
            case link.Gathered():
                pending = self._gathers.pop(message.number)
                if not pending.done():
                    pending.set_result(message.reports)
            case link.Open():
                self._is_open.set()
            case link.Drain():
                self.drain()


def main() -> int:
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=link.ApiStart)
    die_with_parent(start.parent_pid)
    leave_signals_to_parent()
    log = configure_log(start.settings.log_format == "json", start.verbose)
    tracer = make_tracer(start.settings.otlp_traces_endpoint)
    try:
        return uvloop.run(_run(start, tracer, log))
    finally:
        if tracer is not None:
            tracer.close()
        log.close()


async def _run(start: link.ApiStart, tracer: Tracer | None, log: LogWriter) -> int:
    engine = RemoteEngine(start)
    num_processes = start.settings.api_server_count

    service = Service(
        start.settings,
        engine,
        api_processes=engine,
        counts=OpenCounts(mmap.mmap(start.counts_fd, 8 * num_processes), start.index),
        numbers=itertools.count(start.first_number, num_processes),
    )
    drains: list[asyncio.Task[None]] = []
    engine.drain = lambda: drains.append(asyncio.create_task(service.drain()))

    def lost() -> None:
        if not service.ended.is_set():
            log.close()
            os._exit(1)

    engine.lost = lost
    if start.is_another:
        service.history.join()
    listener = socket.socket(fileno=start.listen_fd)
    await serve_http(service, listener, tracer, lambda: engine.send(link.Answering()), when_ready=start.is_another)
    return 0 if service.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
