"""``weft serve``, without the command line: signals, start and end.

Job: run the main process, which keeps the engine and answers calls, or with ``api_server_count`` starts API processes
to answer calls. Report the stages of the start, and drain on SIGTERM. Owns: the process's exit status. Does not know:
routes, flags.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvloop

from weft import __version__
from weft.config.flag_names import with_flags
from weft.engine import wire
from weft.engine.launcher import ENGINE_MODULE, EngineCommand
from weft.engine.supervisor import EngineSupervisor
from weft.processes.log_format import LogFormatter
from weft.server.api_servers import ApiServers
from weft.server.http_server import listen, make_tracer, serve_http
from weft.server.requestlog import configure as configure_log
from weft.server.service import Service
from weft.server.settings import ServerSettings

if TYPE_CHECKING:
    from weft.server.tracing import Tracer


def serve(
    settings: ServerSettings,
    engine_settings: dict[str, Any],
    *,
    verbose: bool = False,
    engine_module: str = ENGINE_MODULE,
) -> int:
    """Serve until a signal ends it. Returns the exit status.

    Raises:
        ConfigError: the settings are not valid, or the address cannot be bound.
    """
    settings.check()
    tracer = make_tracer(settings.otlp_traces_endpoint)
    listeners = listen(settings)
    as_json = settings.log_format == "json"
    log = configure_log(as_json, verbose)
    command = EngineCommand(engine_settings, engine_module, verbose, as_json)
    supervisor = EngineSupervisor(command, restarts=settings.restart_engine)
    report = Report(log.put, as_json, _url(settings, listeners[0]))
    try:
        if len(listeners) > 1:
            return uvloop.run(_run_many(settings, supervisor, listeners, report, verbose))
        return uvloop.run(_run_one(settings, supervisor, listeners[0], report, tracer))
    finally:
        if tracer is not None:
            tracer.close()
        log.close()


class Report:
    """Reports start and end of the server on stderr: as the start log for people, or as JSON objects.

    Args:
        put: takes a line.
        as_json: whether lines are JSON objects.
    """

    def __init__(self, put: Callable[[str], None], as_json: bool, url: str) -> None:
        self._put, self._formatter, self._url = put, LogFormatter(as_json), url

    def answering(self) -> None:
        """Write the version and the URL, which is answered from now on."""
        self._write(f"weft {__version__}: {self._url}", version=__version__, url=self._url)

    def stage(self, name: str, seconds: float, note: str) -> None:
        """A stage of the start is done."""
        self._write(f"  {name:<10} {seconds:6.2f} s  {note}", stage=name, seconds=round(seconds, 3), note=note)

    def draining(self, num_open: int) -> None:
        """The server ends when its open completions have."""
        self._write(f"weft: shutting down; {num_open} open completions may finish", open_completions=num_open)

    def status(self, failure: wire.Failed | None) -> int:
        """The exit status; says why if it is not 0."""
        if failure is None:
            return 0
        self._write(f"weft: error: {with_flags(failure.message)}", "error")
        return 2 if failure.user_error else 1

    def _write(self, text: str, level: str = "info", **fields: Any) -> None:
        if self._formatter.as_json:
            text = self._formatter.line(time.time(), level, __name__, text.strip(), fields)
        self._put(text)


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


async def _run_one(
    settings: ServerSettings,
    supervisor: EngineSupervisor,
    listener: socket.socket,
    report: Report,
    tracer: Tracer | None,
) -> int:
    service = Service(settings, supervisor, report.stage)

    async def drain() -> None:
        report.draining(service.admission.num_open if service.open_engine else 0)
        await service.drain()

    _Stop(drain, service.ended.set).install()
    await serve_http(service, listener, tracer, report.answering)
    return report.status(service.failure)


async def _run_many(
    settings: ServerSettings,
    supervisor: EngineSupervisor,
    listeners: list[socket.socket],
    report: Report,
    verbose: bool,
) -> int:
    servers = ApiServers(settings, supervisor, listeners, report.stage, report.answering, verbose=verbose)

    async def drain() -> None:
        report.draining(servers.num_open)
        await servers.drain()

    _Stop(drain, servers.ended.set).install()
    await servers.run()
    return report.status(servers.failure)


class _Stop:
    """Handlers of SIGTERM and SIGINT: the first signal drains, the second exits at once."""

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
