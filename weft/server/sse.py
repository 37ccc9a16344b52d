"""Server-sent events, and responses that end when the client disconnects.

Job: two kinds of response: a stream of events and a single body, both with a deadline and both ended at once when the
caller disconnects. Owns: the framing of events. Does not know: what is in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.server.errors import ApiError, as_api_error, error_body, error_response

if TYPE_CHECKING:
    from weft.engine.response_stream import PromptDelta, ResponseStream
    from weft.server.connections import ChunkWriter

logger = logging.getLogger(__name__)


class LastEvent(bytes):
    """The last event of a stream, or several of them: what ends the body goes out in the same write."""


DONE = LastEvent(b"data: [DONE]\n\n")

PING = b": ping\n\n"
PING_S = 5.0
"""A stream without an event for so long gets a comment."""

_END_TIMEOUT_S = 5.0
"""How long the end of a stream may wait for a caller that does not read."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def data_event(value: Any) -> bytes:
    """Encode an event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class ChunkEvents:
    """Events of chunks that share a head and have one choice each. ``head``: their other fields, encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['

    def event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """Encode the event of a choice. ``more``: further fields of the chunk."""
        rest = b"]}\n\n" if not more else b"]," + msgspec.json.encode(more)[1:] + b"\n\n"
        return self._head + msgspec.json.encode(choice) + rest

    def text_event(self, before: bytes, text: str, after: bytes) -> bytes:
        """Encode the event of a choice in which only a text changes. ``before``, ``after``: the rest of the choice."""
        return b"".join((self._head, before, msgspec.json.encode(text), after, b"}]}\n\n"))


def openai_error_events(error: ApiError) -> bytes:
    """The events that end a failed stream of the OpenAI API."""
    return data_event(error_body(error)) + DONE


class StreamResponse(Response):
    """Events as they come. Nothing is sent before the first one, or the first ping, so an early failure is still an
    ordinary error.

    Args:
        events: encoded events; closed in any case.
        close: called once at the very end, whatever happened.
        timeout_s: longest life of the response.
        error_events: how a failure after the start is sent.
        pushed: a stream that ``events`` reads, and a function that makes events of its deltas. Between the first and
            the last event, deltas are written as soon as a step was received, without a turn of ``events``.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        timeout_s: float,
        error_events: Callable[[ApiError], bytes] = openai_error_events,
        headers: dict[str, str] | None = None,
        pushed: tuple[ResponseStream, Callable[[list[PromptDelta]], bytes]] | None = None,
    ) -> None:
        self._events = events
        self._close = close
        self._timeout_s = timeout_s
        self._error_events = error_events
        self._extra_headers = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        self._pushed = pushed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send, scope["weft.chunks"], _HEADERS + self._extra_headers)
        if self._pushed is not None:
            stream, render = self._pushed
            stream.push = partial(sender.push, render)
        try:
            with Watch(scope, self._timeout_s, sender.look) as watch:
                await self._run(scope, receive, send, sender, watch)
        finally:
            sender.close()
            self._close()

    async def _run(self, scope: Scope, receive: Receive, send: Send, sender: _Sender, watch: Watch) -> None:
        try:
            async for event in self._events:
                if type(event) is LastEvent:
                    watch.allow(_END_TIMEOUT_S)
                    await sender.end(event)
                    return
                await sender.event(event)
            end = b""
        except (Exception, asyncio.CancelledError) as error:
            known = _explain(watch.reason(error), self._timeout_s)
            watch.allow(_END_TIMEOUT_S)
            if not sender.started:
                await error_response(known, scope["path"])(scope, receive, send)
                return
            end = self._error_events(known)
        watch.allow(_END_TIMEOUT_S)
        await sender.end(end)


class _Sender:
    """Sends events, and a comment where there was none for a while: proxies and clients see that the call lives."""

    def __init__(self, send: Send, chunks: ChunkWriter, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._chunks = send, chunks
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._is_busy = False
        self._ping: asyncio.Task[None] | None = None
        self.started = False

    async def event(self, content: bytes) -> None:
        self._is_busy = True
        if not self.started:
            await self._start()
        if self._chunks.is_free:
            self._chunks.write(content)
        else:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})
        self._last, self._is_busy = self._loop.time(), False

    def push(self, render: Callable[[list[PromptDelta]], bytes], deltas: list[PromptDelta]) -> bool:
        """Write what ``render`` makes of the deltas now; False, and nothing is rendered, if that would have to wait."""
        if self._is_busy or not self.started or not self._chunks.is_free:
            return False
        if content := render(deltas):
            self._chunks.write(content)
            self._last = self._loop.time()
        return True

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def end(self, content: bytes) -> None:
        """The last bytes, perhaps none. No comment may come behind them, however long they wait."""
        self._is_busy = True
        self.close()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": content})

    def look(self) -> float:
        """Ping if there was nothing for long. Returns when to look again, in seconds."""
        quiet_s = self._loop.time() - self._last
        if quiet_s >= PING_S and not self._is_busy:  # else the caller does not read what it has
            self._ping = self._loop.create_task(self.event(PING))
            quiet_s = 0.0
        return max(PING_S - quiet_s, 0.1)

    def close(self) -> None:
        if self._ping is not None:
            self._ping.cancel()


class JsonResponse(Response):
    """One JSON body, computed while the caller waits.

    Args:
        work: gives the body.
        close, timeout_s, headers: as above.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[Any]],
        close: Callable[[], None],
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._work = work
        self._close = close
        self._timeout_s = timeout_s
        self._extra_headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Watch(scope, self._timeout_s) as watch:
                response = await self._response(watch, scope["path"])
                watch.allow(_END_TIMEOUT_S)
                await response(scope, receive, send)
        finally:
            self._close()

    async def _response(self, watch: Watch, path: str) -> Response:
        try:
            body = msgspec.json.encode(await self._work())
        except (Exception, asyncio.CancelledError) as error:
            return error_response(_explain(watch.reason(error), self._timeout_s), path)
        return Response(body, headers=self._extra_headers, media_type="application/json")


def _explain(error: Exception, timeout_s: float) -> ApiError:
    if isinstance(error, TimeoutError):
        return ApiError(504, f"the request took longer than {timeout_s:g} s", type="server_error", code="timeout")
    known = as_api_error(error)
    if known.status == 500:
        logger.error("a request failed", exc_info=error)
    return known


class Watch:
    """Cancel the task that answers a call when its caller leaves or its time is over.

    The context manager suppresses its own cancellation, and errors of a connection that breaks during a write.

    Args:
        scope: of the call; ``weft.on_disconnect`` takes what to call when the caller leaves (``connections.py``).
        timeout_s: the time.
        look: called now and then; returns when to call it again, in seconds.
    """

    def __init__(self, scope: Scope, timeout_s: float, look: Callable[[], float] | None = None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._on_disconnect = scope["weft.on_disconnect"]
        self._look = look
        self._deadline = self._loop.time() + timeout_s
        self._is_gone = self._is_late = False
        self._on_disconnect(self._gone)
        self._timer = self._loop.call_later(timeout_s if look is None else min(timeout_s, PING_S), self._wake)

    def allow(self, seconds: float) -> None:
        """The time ends so long from now, or as soon after as the caller that does not read is looked at."""
        self._deadline = self._loop.time() + seconds

    def reason(self, error: BaseException) -> Exception:
        """Return ``error``, or TimeoutError if the time was over. Raise any other cancellation."""
        if isinstance(error, Exception):
            return error
        if not self._is_late or self._is_gone:
            raise error
        self._is_late = False
        self._task.uncancel()
        return TimeoutError()

    def _gone(self) -> None:
        self._cancel()
        self._is_gone = True

    def _cancel(self) -> None:
        """Once for all reasons: ``__exit__`` takes back one."""
        if not self._is_gone and not self._is_late:
            self._task.cancel()

    def _wake(self) -> None:
        left = self._deadline - self._loop.time()
        if left <= 0:
            self._cancel()
            self._is_late = True
            left = _END_TIMEOUT_S  # for the error to be sent
            self._deadline = self._loop.time() + left
        wait = left if self._look is None else min(left, self._look())
        self._timer = self._loop.call_later(wait, self._wake)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._timer.cancel()
        self._on_disconnect(None)
        if isinstance(error, asyncio.CancelledError) and (self._is_gone or self._is_late):
            return self._task.uncancel() == 0
        return isinstance(error, OSError)
