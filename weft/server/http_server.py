"""The socket, the HTTP server and the interpreter settings of every API process.

Job: listen, and run the application and the service in one event loop until the service is over. Owns: the HTTP server.
Does not know: who keeps the engine, signals, how many such processes there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from weft.errors import ConfigError
from weft.server.app import build_app
from weft.server.authentication import STATE_PATHS
from weft.server.connections import protocol_class, raise_descriptor_limit
from weft.server.service import Service, State
from weft.server.settings import ServerSettings

if TYPE_CHECKING:
    from weft.server.tracing import Tracer

_SWITCH_S = 0.0005
"""How long a rendering thread may keep the event loop from running (the interpreter's default is 5 ms)."""

_GC_OBJECTS = 10_000
"""New objects between two collections (the interpreter's default is 700): hundreds of open calls are thousands of
objects, and each collection looks at all the young ones. It still takes less than a millisecond."""

_BACKLOG = 2048

_FLUSH_S = 0.5
"""How long streams get to send their last event after the engine has died."""


def make_tracer(endpoint: str | None) -> Tracer | None:
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


def listen(settings: ServerSettings) -> list[socket.socket]:
    """The listening sockets, one per API process, made before the model is loaded: a port in use is reported at once.

    With several the kernel spreads connections over them (SO_REUSEPORT). Raises ConfigError if the address cannot be
    had.
    """
    first = _bound(settings, settings.port, is_shared=False)
    if settings.api_server_count == 1:
        first.listen(_BACKLOG)  # whoever connects now waits for the event loop and is not turned away
        return [first]
    port = first.getsockname()[1]  # nobody else has it: a shared socket would not have shown it
    first.close()
    sockets = [_bound(settings, port, is_shared=True) for _ in range(settings.api_server_count)]
    for one in sockets:
        one.listen(_BACKLOG)
    return sockets


def _bound(settings: ServerSettings, port: int, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error
    listener.set_inheritable(False)
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own. ``on_answering`` is called once calls are answered."""

    def __init__(self, config: uvicorn.Config, on_answering: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_answering = on_answering

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_answering()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _freeze(service: Service) -> None:
    """Exclude all objects from garbage collection once the engine is ready, which saves 20 ms per collection."""
    await service.became_ready.wait()
    gc.freeze()


async def serve_http(
    service: Service,
    listener: socket.socket,
    tracer: Tracer | None,
    on_answering: Callable[[], None],
    *,
    when_ready: bool = False,
) -> None:
    """Start the service, answer calls until it is over, and close it.

    Args:
        on_answering: called once calls are answered, also if only to tell that the engine is starting.
        when_ready: let connections wait until the service is ready, instead of telling that it is starting.
    """
    config = uvicorn.Config(
        build_app(service, tracer),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        http=protocol_class(raise_descriptor_limit(), STATE_PATHS),
        ws="none",
        timeout_graceful_shutdown=2,
        backlog=_BACKLOG,
    )
    http = _HttpServer(config, on_answering)
    sys.setswitchinterval(_SWITCH_S)
    service.start()
    ended = asyncio.create_task(service.ended.wait())
    if when_ready:
        await asyncio.wait((ended, asyncio.create_task(service.became_ready.wait())), return_when=FIRST_COMPLETED)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    gc.set_threshold(_GC_OBJECTS)
    freezing = asyncio.create_task(_freeze(service))
    await asyncio.wait((serving, ended), return_when=FIRST_COMPLETED)
    if service.state is State.DEAD:
        await asyncio.sleep(_FLUSH_S)
    freezing.cancel()
    http.should_exit = True
    await serving
    await service.close()
