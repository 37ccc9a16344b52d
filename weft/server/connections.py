"""HTTP connections and their limits before authentication.

Job: uvicorn's HTTP protocol with limits on the head of a request, on the time it takes to come, and on how many
connections there are; the process's limit on descriptors. Owns: these limits. Does not know: paths' meanings, keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.server.errors import ApiError, error_body

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers."""

HEAD_TIMEOUT_S = 10.0
"""For a whole head, from the connection or the first byte on."""

LINGER_S = 30.0
"""Seconds for which the rest of a request is read and dropped after its response was sent. Closing a connection while
bytes arrive resets it, and the caller loses a response that it has not read. A response of which nothing is read for
so long is cut."""

_SPARE = 64
"""Descriptors for everything but connections: the log, the engine's sockets, files."""

KEPT = 32
"""Connections kept for those who ask how the server is."""

_REASONS = {431: "Request Header Fields Too Large", 408: "Request Timeout", 503: "Service Unavailable"}


def raise_descriptor_limit() -> int:
    """Raise the soft limit on descriptors to the hard one. Returns how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return max(KEPT + 1, soft - _SPARE)


def protocol_class(max_connections: int, state_paths: Collection[str]) -> type[HttpToolsProtocol]:
    """The protocol of one server.

    Args:
        max_connections: beyond them a connection is closed; the last ``KEPT`` are for ``state_paths`` alone.
    """

    class Protocol(LimitedProtocol):
        limit, paths, waiting = max_connections, frozenset(state_paths), {}

    return Protocol


class HeadWithBody:
    """The transport of one response: its head waits for the first bytes of the body, since each write is a system call.

    uvicorn writes the head at once and the body next, which handlers send right behind it. ``close`` closes the
    connection, or has the rest of the request dropped before.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self._close = transport, close
        self._head: bytes | None = None
        self.write: Callable[[bytes], None] = self._write_first

    def _write_first(self, content: bytes) -> None:
        if content.startswith(b"HTTP/1.1 100 "):
            self._transport.write(content)
        elif self._head is None:
            self._head = content
        else:
            self._flush(content)

    def _flush(self, content: bytes = b"") -> None:
        head, self._head = self._head, None
        self.write = self._transport.write
        if head is not None:
            self._transport.write(head + content)

    def close(self) -> None:
        self._flush()
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class ChunkWriter:
    """Writes parts of a chunked body at once, past ASGI's messages."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_free(self) -> bool:
        """False if the caller does not read fast enough or the body has not begun: ASGI's message has to be sent, which
        waits."""
        cycle = self._cycle
        blocked = cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        return not blocked and bool(cycle.chunked_encoding)

    def write(self, content: bytes) -> None:
        """To be called only while ``is_free``."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(content), content))


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    limit: int
    paths: frozenset[str]
    waiting: dict[LimitedProtocol, None]
    """Connections of the server whose requests are answered and of which more is to come, the oldest first."""
    _raw_bytes = 0  # of a head that is not complete
    _field_bytes = 0  # of what was read of it
    _is_refused = False
    _is_crowded = False
    _is_in_body = False
    _timer: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _num_answers = 0
    _when_lost: Callable[[], None] | None = None
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limit - KEPT and self.waiting:
            next(iter(self.waiting)).cut()
        if len(self.connections) > self.limit:
            transport.abort()
            return
        self._is_crowded = len(self.connections) > self.limit - KEPT
        self._arm()

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        self._stop_lingering()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(error)
        self._lost()

    def on_disconnect(self, cycle: RequestResponseCycle, call: Callable[[], None] | None) -> None:
        """Call ``call`` when the other end has gone; None cancels this. Handlers find this method in the scope, for
        their ``cycle``. Requests of a connection are answered in order, so only one handler waits at a time."""
        self._when_lost, self._answering = call, cycle
        if call is not None and self.transport.is_closing():
            self.loop.call_soon(self._lost)

    def _lost(self) -> None:
        if self._when_lost is not None and self._answering is not None:
            self._answering.disconnected = True  # uvicorn tells the last of several in a row only
            self._when_lost()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _linger(self) -> None:
        self._unset_keepalive_if_required()
        if self._lingering is None:
            self._lingering = self.loop.call_later(LINGER_S, self.cut)
            self.waiting[self] = None

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
            del self.waiting[self]

    def cut(self) -> None:
        """End the connection at once; another may take its place."""
        self._stop_lingering()
        self.connections.discard(self)
        self.transport.abort()

    def _expect_reading(self) -> None:
        """See to it that what was written is read: a connection closes only then."""
        if self._unread is None and self.transport.get_write_buffer_size():
            state = self._num_answers, self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(LINGER_S, self._cut_if_unread, state)

    def _cut_if_unread(self, before: tuple[int, int]) -> None:
        self._unread = None
        if before == (self._num_answers, self.transport.get_write_buffer_size()):
            self.cut()
        else:
            self._expect_reading()

    def _close(self) -> None:
        """Nothing more is said; the other end is heard until it closes too, or ``LINGER_S`` have passed."""
        if not self._is_dropping or self.transport.is_closing():
            self.transport.close()
            self._expect_reading()
            return
        self._is_refused = True
        self.transport.write_eof()
        self._linger()

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the head of the request did not come within {HEAD_TIMEOUT_S:g} s")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._timer is not None:  # the head is on its way
            self._raw_bytes += len(data)
        was_dropping = self._is_dropping
        super().data_received(data)
        if self._timer is not None and self._raw_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._timer is None and self._is_idle:
            if was_dropping:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            else:
                self._arm()  # bytes that are no request yet

    @property
    def _is_answered(self) -> bool:
        """Whether the last request whose head was read has its answer, and with it all before."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_dropping(self) -> bool:
        return self._is_in_body and self._is_answered

    @property
    def _is_idle(self) -> bool:
        return self._is_answered and not self._is_in_body and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            super().send_400_response(msg)
            self._expect_reading()

    def on_message_begin(self) -> None:
        if self._is_refused:
            return
        self._field_bytes = 0
        self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value)
        is_trailer = self._is_in_body
        if self._field_bytes <= MAX_HEAD_BYTES and not is_trailer:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_refused:  # a request behind one that was refused
            return
        self._disarm()
        self._raw_bytes, self._is_in_body = 0, True
        if self._field_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._is_crowded and self.url.partition(b"?")[0].decode("latin-1") not in self.paths:
            self._refuse(503, "there are too many connections; try again later")
        else:
            super().on_headers_complete()
            self.scope["weft.on_disconnect"] = partial(self.on_disconnect, self.cycle)  # type: ignore[typeddict-unknown-key]
            self.scope["weft.chunks"] = ChunkWriter(self.cycle)  # type: ignore[typeddict-unknown-key]
            if self.scope["method"] != "HEAD":  # the answer to it has no body that its head could go with
                self.cycle.transport = HeadWithBody(self.transport, self._close)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            self._is_in_body = False
            self._stop_lingering()
            self.scope["weft.is_complete"] = True  # type: ignore[typeddict-unknown-key]  # for ``read_body``
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_answers += 1
        self._expect_reading()
        if self._is_dropping and not self.transport.is_closing():
            self._linger()

    def _refuse_head(self) -> None:
        self._is_in_body = True  # whatever still comes is dropped like a body
        self._refuse(431, f"the head of the request is larger than this server takes: {MAX_HEAD_BYTES:,} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, whatever has come of the request, and close."""
        self._is_refused = True
        self._disarm()
        kind = "server_error" if status == 503 else "invalid_request_error"
        body = msgspec.json.encode(error_body(ApiError(status, message, type=kind)))
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        if self._is_answered:
            self.transport.write(f"{head}{retry}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if status == 431:
                self._close()
                return
        self.transport.close()
        self._expect_reading()
