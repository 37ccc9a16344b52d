"""Server-sent events, and answers that end when their caller leaves.

Job: two kinds of response: a stream of events and a single body, both with a deadline and both ended at once when the
caller disconnects. Owns: the framing of events. Does not know: what is in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from weft.server.errors import ApiError, as_api_error, error_body, error_response

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

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
    """One event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class ChunkEvents:
    """Events of chunks that share a head and have one choice each. ``head``: their other fields, encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['

    def event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """``more``: what stands beside the choice."""
        rest = b"]}\n\n" if not more else b"]," + msgspec.json.encode(more)[1:] + b"\n\n"
        return self._head + msgspec.json.encode(choice) + rest


def openai_error_events(error: ApiError) -> bytes:
    """How a stream of the OpenAI API ends when it cannot go on."""
    return data_event(error_body(error)) + DONE


class StreamResponse(Response):
    """Events as they come. Nothing is sent before the first one, or the first ping, so an early failure is still an
    ordinary error.

    Args:
        events: encoded events; closed in any case.
        close: called once at the very end, whatever happened.
        timeout_s: longest life of the response.
        error_events: how a failure after the start is told.
        headers: further headers.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        timeout_s: float,
        error_events: Callable[[ApiError], bytes] = openai_error_events,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._events = events
        self._close = close
        self._timeout_s = timeout_s
        self._error_events = error_events
        self._extra_headers = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send, _HEADERS + self._extra_headers)
        try:
            await _until_gone(receive, self._run(scope, receive, send, sender))
        finally:
            sender.close()
            self._close()

    async def _run(self, scope: Scope, receive: Receive, send: Send, sender: _Sender) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                async for event in self._events:
                    await sender.event(event)
        except Exception as error:
            known = _explain(error, self._timeout_s)
            if not sender.started:
                await error_response(known)(scope, receive, send)
                return
            async with asyncio.timeout(_END_TIMEOUT_S):
                await sender.event(self._error_events(known))
        sender.close()
        async with asyncio.timeout(_END_TIMEOUT_S):
            await send({"type": "http.response.body", "body": b""})


class _Sender:
    """Sends events, and a comment where there was none for a while: proxies and clients see that the call lives."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._is_busy = False
        self._timer = self._loop.call_later(PING_S, self._look)
        self._ping: asyncio.Task[None] | None = None
        self.started = False

    async def event(self, content: bytes) -> None:
        self._is_busy = True
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})
        self._last, self._is_busy = self._loop.time(), False

    def _look(self) -> None:
        quiet_s = self._loop.time() - self._last
        if quiet_s >= PING_S and not self._is_busy:  # else the caller does not read what it has
            self._ping = self._loop.create_task(self.event(PING))
            quiet_s = 0.0
        self._timer = self._loop.call_later(max(PING_S - quiet_s, 0.1), self._look)

    def close(self) -> None:
        self._timer.cancel()
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
            await _until_gone(receive, self._run(scope, receive, send))
        finally:
            self._close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = msgspec.json.encode(await self._work())
            response = Response(body, headers=self._extra_headers, media_type="application/json")
        except Exception as error:
            response = error_response(_explain(error, self._timeout_s))
        await response(scope, receive, send)


def _explain(error: Exception, timeout_s: float) -> ApiError:
    if isinstance(error, TimeoutError):
        return ApiError(504, f"the request took longer than {timeout_s:g} s", type="server_error", code="timeout")
    known = as_api_error(error)
    if known.status == 500:
        logger.error("a request failed", exc_info=error)
    return known


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Run ``work``; stop it when the caller disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
    except (OSError, TimeoutError):
        return  # the caller does not read, or the connection broke while something was being sent


async def _disconnected(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
