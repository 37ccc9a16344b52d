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

_LAST_WORDS_S = 5.0
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
    """Events as they come. Nothing is sent before the first one, so an early failure is still an ordinary error.

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
        try:
            await _until_gone(receive, self._run(scope, receive, send))
        finally:
            self._close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with asyncio.timeout(self._timeout_s):
                async for event in self._events:
                    if not started:
                        started = True
                        headers = _HEADERS + self._extra_headers
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            known = _explain(error, self._timeout_s)
            if not started:
                await error_response(known)(scope, receive, send)
                return
            async with asyncio.timeout(_LAST_WORDS_S):
                await send({"type": "http.response.body", "body": self._error_events(known), "more_body": True})
        async with asyncio.timeout(_LAST_WORDS_S):
            await send({"type": "http.response.body", "body": b""})


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
