"""``weft serve``, without the command line: sockets, signals, start and end.

Job: listen, run the application and the service in one event loop, tell the start stage by stage, drain on SIGTERM.
Owns: the process's exit status. Does not know: routes, flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from weft import __version__
from weft.engine.launcher import ENGINE_MODULE
from weft.errors import ConfigError
from weft.server.app import build_app
from weft.server.authentication import STATE_PATHS
from weft.server.connections import protocol_class, raise_descriptor_limit
from weft.server.requestlog import configure as configure_log
from weft.server.service import Service, State
from weft.server.settings import ServerSettings

if TYPE_CHECKING:
    from weft.server.tracing import Tracer

_SWITCH_S = 0.0005
"""How long a rendering thread may keep the event loop from running (the interpreter's default is 5 ms)."""

_GC_OBJECTS = 10_000
"""New objects between two collections (the interpreter's default is 700): hundreds of open calls are thousands of
objects, and each collection looks at all the young ones. It still takes less than a millisecond."""

Say = Callable[[str], None]
"""Takes one line for stderr."""

_BACKLOG = 2048

_FLUSH_S = 0.5
"""How long streams get to send their last event after the engine has died."""


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
    tracer = _tracer(settings.otlp_traces_endpoint)
    listener = _listen(settings)
    sys.setswitchinterval(_SWITCH_S)
    log = configure_log(settings.log_format == "json", verbose)
    try:
        return uvloop.run(_run(settings, engine_settings, listener, tracer, engine_module, verbose, log.put))
    finally:
        if tracer is not None:
            tracer.close()
        log.close()


def _tracer(endpoint: str | None) -> Tracer | None:
    """Raises ConfigError if spans are wanted and cannot be made."""
    if endpoint is None:
        return None
    try:
        from weft.server.tracing import Tracer
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}; install it with: pip install 'weft[otel]'"
        ) from error
    return Tracer.towards(endpoint)


def _listen(settings: ServerSettings) -> socket.socket:
    """The listening socket, made before the model is loaded: a port in use is told at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another --port or --host"
        ) from error
    listener.set_inheritable(False)
    listener.listen(_BACKLOG)  # whoever connects now waits for the event loop and is not turned away
    return listener


class StartReport:
    """Tells the stages of the start. ``say``: takes one line, for stderr."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def head(self, settings: ServerSettings, listener: socket.socket) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._say(f"weft {__version__}: http://{host}:{listener.getsockname()[1]}")

    def stage(self, name: str, seconds: float, note: str) -> None:
        self._say(f"  {name:<10} {seconds:6.2f} s  {note}")


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(
    settings: ServerSettings,
    engine_settings: dict[str, Any],
    listener: socket.socket,
    tracer: Tracer | None,
    engine_module: str,
    verbose: bool,
    say: Say,
) -> int:
    report = StartReport(say)
    report.head(settings, listener)
    service = Service(settings, engine_settings, report.stage, engine_module, verbose=verbose)
    config = uvicorn.Config(
        build_app(service, tracer),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        http=protocol_class(raise_descriptor_limit(), STATE_PATHS),
        ws="none",
        timeout_graceful_shutdown=2,
        backlog=_BACKLOG,
    )
    http = _HttpServer(config)
    stop = _Stop(service, say)
    stop.install(asyncio.get_running_loop())
    service.start()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    gc.freeze()  # what is loaded by now stays: it need not be looked at by every collection
    gc.set_threshold(_GC_OBJECTS)
    await asyncio.wait((serving, asyncio.create_task(service.ended.wait())), return_when=asyncio.FIRST_COMPLETED)
    if service.state is State.DEAD:
        await asyncio.sleep(_FLUSH_S)
    http.should_exit = True
    await serving
    await service.close()
    return _status(service, say)


def _status(service: Service, say: Say) -> int:
    if service.failure is None:
        return 0
    say(f"weft: error: {service.failure.message}")
    return 2 if service.failure.user_error else 1


class _Stop:
    """What SIGTERM and SIGINT do: the first drains, the second leaves at once."""

    def __init__(self, service: Service, say: Say) -> None:
        self._service = service
        self._say = say
        self._draining: asyncio.Task[None] | None = None

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self._draining is not None:
            self._service.ended.set()
            return
        num_open = self._service.admission.num_open if self._service.open_engine else 0
        self._say(f"weft: shutting down; {num_open} open completions may finish")
        self._draining = asyncio.create_task(self._service.drain())
