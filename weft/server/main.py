"""``weft serve``, without the command line: signals, start and end.

Job: one process that keeps the engine and answers calls, or, with ``api_server_count``, one that keeps the engine
before several that answer; report the start stage by stage, drain on SIGTERM. Owns: the process's exit status. Does not
know: routes, flags.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvloop

from weft import __version__
from weft.engine import wire
from weft.engine.launcher import ENGINE_MODULE, EngineCommand
from weft.engine.supervisor import EngineSupervisor
from weft.server.api_servers import ApiServers
from weft.server.http_server import listen, make_tracer, serve_http
from weft.server.requestlog import configure as configure_log
from weft.server.service import Service
from weft.server.settings import ServerSettings

if TYPE_CHECKING:
    from weft.server.tracing import Tracer

Say = Callable[[str], None]
"""Takes one line for stderr."""


def serve(
    settings: ServerSettings,
    engine_settings: dict[str, Any],
    *,
    verbose: bool = False,
    engine_module: str = ENGINE_MODULE,
) -> int:
    """Serve until a signal ends it. Returns the exit status.

    Raises:
        ConfigError: the settings are not valid, or the address cannot be had.
    """
    settings.check()
    tracer = make_tracer(settings.otlp_traces_endpoint)
    listeners = listen(settings)
    log = configure_log(settings.log_format == "json", verbose)
    command = EngineCommand(engine_settings, engine_module, verbose)
    supervisor = EngineSupervisor(command, restarts=settings.restart_engine)
    report = StartReport(log.put)
    report.head(settings, listeners[0])
    try:
        if len(listeners) > 1:
            return uvloop.run(_run_many(settings, supervisor, listeners, report, verbose))
        return uvloop.run(_run_one(settings, supervisor, listeners[0], report, tracer))
    finally:
        if tracer is not None:
            tracer.close()
        log.close()


class StartReport:
    """Reports the stages of the start. ``say``: takes one line, for stderr."""

    def __init__(self, say: Say) -> None:
        self.say = say

    def head(self, settings: ServerSettings, listener: socket.socket) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.say(f"weft {__version__}: http://{host}:{listener.getsockname()[1]}")

    def stage(self, name: str, seconds: float, note: str) -> None:
        self.say(f"  {name:<10} {seconds:6.2f} s  {note}")


async def _run_one(
    settings: ServerSettings,
    supervisor: EngineSupervisor,
    listener: socket.socket,
    report: StartReport,
    tracer: Tracer | None,
) -> int:
    service = Service(settings, supervisor, report.stage)

    async def drain() -> None:
        num_open = service.admission.num_open if service.open_engine else 0
        report.say(f"weft: shutting down; {num_open} open completions may finish")
        await service.drain()

    _Stop(drain, service.ended.set).install()
    await serve_http(service, listener, tracer)
    return _status(service.failure, report.say)


async def _run_many(
    settings: ServerSettings,
    supervisor: EngineSupervisor,
    listeners: list[socket.socket],
    report: StartReport,
    verbose: bool,
) -> int:
    servers = ApiServers(settings, supervisor, listeners, report.stage, verbose=verbose)

    async def drain() -> None:
        report.say(f"weft: shutting down; {servers.num_open} open completions may finish")
        await servers.drain()

    _Stop(drain, servers.ended.set).install()
    await servers.run()
    return _status(servers.failure, report.say)


def _status(failure: wire.Failed | None, say: Say) -> int:
    if failure is None:
        return 0
    say(f"weft: error: {failure.message}")
    return 2 if failure.user_error else 1


class _Stop:
    """What SIGTERM and SIGINT do: the first drains, the second leaves at once."""

    def __init__(self, drain: Callable[[], Any], leave: Callable[[], None]) -> None:
        self._drain, self._leave = drain, leave
        self._draining: asyncio.Task[None] | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self._draining is not None:
            self._leave()
            return
        self._draining = asyncio.create_task(self._drain())
