"""Test the cost of a connection before its key is known, and the comments that keep a quiet stream alive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import PlainTextResponse

from tests.patience import GUARD_S, stretched
from weft.server import connections, sse
from weft.server.connections import KEPT, MAX_HEAD_BYTES, ChunkWriter, HeadWithBody, protocol_class
from weft.server.sse import PING, StreamResponse, Watch

HEAD = b"GET /x HTTP/1.1\r\nHost: localhost\r\n"
LARGE = 16_000_000
"""Bytes of an answer that no kernel buffers."""


def serve(
    max_connections: int, body: Callable[[int], Awaitable[None]], reads_bodies: bool = False, keep_alive_s: int = 5
) -> list[str]:
    """Run ``body`` with the port of a server that answers everything. Returns the paths that were asked for."""
    paths: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        while reads_bodies and (await receive()).get("more_body"):
            pass
        headers = {"Connection": "close"} if scope["path"] == "/close" else {}
        content = bytes(LARGE) if scope["path"] == "/large" else "ok"
        await PlainTextResponse(content, headers=headers)(scope, receive, send)

    async def main() -> None:
        protocol = protocol_class(max_connections, ["/health"])
        config = uvicorn.Config(
            app, port=0, lifespan="off", log_config=None, http=protocol, ws="none", timeout_keep_alive=keep_alive_s
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(body(server.servers[0].sockets[0].getsockname()[1]), GUARD_S)
        finally:
            server.should_exit = server.force_exit = True
            await serving

    uvloop.run(main())
    return paths


async def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send ``parts`` and return what the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("count", [1, 3000])
def test_heads_have_a_limit(count: int) -> None:
    async def body(port: int) -> None:
        headers = [b"X-%d: " % i + b"a" * (90_000 if count == 1 else 50) + b"\r\n" for i in range(count)]
        for parts in ([HEAD + b"".join(headers) + b"\r\n"], [HEAD, *headers]):
            answer = await talk(port, *parts)
            assert answer.startswith(b"HTTP/1.1 431 ")
        fine = HEAD + b"X: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\nConnection: close\r\n\r\n"
        assert (await talk(port, fine)).endswith(b"ok")

    serve(1000, body)


def test_heads_do_not_add_up() -> None:
    """Each of many on one connection may be as large as the first, also where it comes in parts."""
    rest = b"A: %s\r\n\r\n" % (b"a" * (MAX_HEAD_BYTES // 8))

    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(10):
            writer.write(HEAD)
            await asyncio.sleep(0.003)
            writer.write(rest)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        writer.close()

    assert serve(100, body) == ["/x"] * 10


@pytest.mark.parametrize("second", [b"GET /second HTTP/1.1\r\n\r\n", b"GET /second", b"\0"])
def test_nothing_behind_a_refused_head_is_run(
    second: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections, "LINGER_S", 0.3)

    async def body(port: int) -> None:
        answer = await talk(port, HEAD + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n" + second, pause_s=0.5)
        assert answer.startswith(b"HTTP/1.1 431 ") and answer.count(b"HTTP/1.1") == 1

    assert serve(1000, body) == []
    level = logging.ERROR if second == b"\0" else logging.WARNING  # uvicorn warns of what is not HTTP
    assert not [record for record in caplog.records if record.levelno >= level]


def test_an_answer_does_not_limit_the_body_of_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.1)
    post = b"POST /second HTTP/1.1\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"

    async def body(port: int) -> None:
        assert (await talk(port, HEAD + b"\r\n" + post, b"body", pause_s=0.4)).count(b"ok") == 2
        assert (await talk(port, b"GET /close HTTP/1.1\r\n\r\n" + post)).count(b"ok") == 1

    assert serve(1000, body, reads_bodies=True) == ["/x", "/second", "/close"]


@pytest.mark.parametrize("behind", [b"", HEAD])
def test_a_connection_is_kept_alive_behind_a_dropped_body(behind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1.2)
    head = b"POST" + HEAD[3:] + b"Content-Length: 4\r\n\r\n"

    async def body(port: int) -> None:
        answer = await asyncio.wait_for(talk(port, head, b"body" + behind, pause_s=0.1), stretched(5))
        assert answer.count(b"ok") == 1
        assert (b"HTTP/1.1 408 " in answer) == bool(behind)

    serve(1000, body, keep_alive_s=1)


def test_a_body_that_nobody_wants_costs_no_answer() -> None:
    """A connection that is closed while bytes come would be reset."""
    post = b"POST" + HEAD[3:] + b"Content-Length: 8000000\r\n"

    async def body(port: int) -> None:
        closing = [post + b"Connection: close\r\n\r\n", *[bytes(1_000_000)] * 8]
        assert (await talk(port, *closing, pause_s=0.005)).endswith(b"ok")
        another = [post + b"\r\n", *[bytes(1_000_000)] * 8, HEAD + b"Connection: close\r\n\r\n"]
        assert (await talk(port, *another, pause_s=0.005)).count(b"ok") == 2

    serve(1000, body)


@pytest.mark.parametrize("head", [b"Connection: close\r\n\r\n", b"\r\n", b"X: " + b"a" * MAX_HEAD_BYTES])
def test_a_body_that_nobody_wants_is_not_read_for_ever(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.1)

    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST" + HEAD[3:] + b"Content-Length: 8000000\r\n" + head)
        with contextlib.suppress(ConnectionError):
            while not writer.transport.is_closing():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.01)
            await reader.read()
        writer.close()

    serve(1000, body)


async def wait_for_room(port: int) -> None:
    """Until a connection is taken."""
    while not (await talk(port, HEAD + b"Connection: close\r\n\r\n")).endswith(b"ok"):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("end", [b"\r\n", b"\r\n" + HEAD + b"\r\n", b"Connection: close\r\n\r\n"])
def test_an_answer_that_nobody_reads_is_not_kept_for_ever(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.3)

    async def body(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(HEAD.replace(b"/x", b"/large") + end)
        await asyncio.sleep(0.1)
        assert b" 503 " in await talk(port, HEAD + b"Connection: close\r\n\r\n")
        await wait_for_room(port)
        writer.close()

    serve(KEPT + 1, body, keep_alive_s=1)


def test_an_answer_that_is_read_slowly_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.3)  # longer than a busy machine keeps both ends from running

    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(HEAD.replace(b"/x", b"/large") + b"Connection: close\r\n\r\n")
        count = 0
        while part := await reader.read(1_000_000):
            count += len(part)
            await asyncio.sleep(0.01 if count < LARGE // 2 else 0)
        assert count > LARGE
        writer.close()

    serve(1000, body)


@pytest.mark.parametrize("start", [b"", b"\r\n", b"GET", HEAD, HEAD + b"Connection: keep-alive\r\n\r\n\r\n" + HEAD])
def test_heads_that_do_not_come_are_not_waited_for(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)

    async def body(port: int) -> None:
        answer = await asyncio.wait_for(talk(port, start), stretched(5))
        assert b"HTTP/1.1 408 " in answer or b"HTTP/1.1 200 " in answer

    serve(1000, body)


def test_the_last_connections_are_for_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(port: int) -> None:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert (await talk(port, HEAD + b"Connection: close\r\n\r\n")).endswith(b"ok"), "the fourth"
        await asyncio.sleep(0.1)
        open_ones.append(await asyncio.open_connection("127.0.0.1", port))
        await asyncio.sleep(0.1)
        health = HEAD.replace(b"/x", b"/health?a=1") + b"Connection: close\r\n\r\n"
        assert (await talk(port, health)).endswith(b"ok")
        refused = await talk(port, HEAD + b"\r\n")
        assert refused.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in refused
        open_ones += [await asyncio.open_connection("127.0.0.1", port) for _ in range(KEPT - 1)]
        await asyncio.sleep(0.1)
        assert (await talk(port, health)).endswith(b"ok"), "the last one"
        open_ones.append(await asyncio.open_connection("127.0.0.1", port))
        await asyncio.sleep(0.1)
        assert not await talk(port, health)
        for _, writer in open_ones:
            writer.close()
        await asyncio.sleep(0.1)
        assert (await talk(port, HEAD + b"Connection: close\r\n\r\n")).endswith(b"ok")

    serve(KEPT + 4, body)


@pytest.mark.parametrize("num_gone", [0, 1])
def test_answered_requests_whose_rest_does_not_come_make_room_for_others(num_gone: int) -> None:
    """One that has gone by itself makes none a second time."""
    post = b"POST" + HEAD[3:] + b"Content-Length: 8000000\r\n\r\n"

    async def body(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in silent:
            writer.write(post)
        for reader, _ in silent:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        for _, writer in silent[:num_gone]:
            writer.close()
        await asyncio.sleep(0.05 * num_gone)
        new = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 + num_gone)]
        for _, writer in new:
            writer.write(HEAD + b"\r\n")
        for reader, _ in new:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        for reader, _ in silent[num_gone : 3 + num_gone]:
            with contextlib.suppress(ConnectionError):
                assert not await asyncio.wait_for(reader.read(), GUARD_S), "it was closed"
        for _, writer in silent + new:
            writer.close()

    serve(KEPT + 4, body)


class Written:
    """Takes what would go to the network."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, content: bytes) -> None:
        self.writes.append(content)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_the_head_of_a_response_goes_with_its_body() -> None:
    written = Written()
    transport = HeadWithBody(written, written.close)  # type: ignore[arg-type]
    for part in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"first", b"second"):
        transport.write(part)
    assert written.writes == [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nfirst", b"second"]
    alone = HeadWithBody(written, written.close)  # type: ignore[arg-type]
    alone.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    alone.close()
    assert written.writes[-1].startswith(b"HTTP/1.1 204") and written.is_closed and alone.is_closing()


@pytest.mark.parametrize("state", ["write_paused", "disconnected", "response_complete", "not chunked"])
def test_a_chunk_that_cannot_go_at_once_is_left_to_asgi(state: str) -> None:
    written = Written()
    flow = SimpleNamespace(write_paused=False)
    cycle = SimpleNamespace(
        flow=flow, transport=written, disconnected=False, response_complete=False, chunked_encoding=True
    )
    chunks = ChunkWriter(cycle)  # type: ignore[arg-type]
    assert chunks.is_free
    chunks.write(b"0123456789abcdefg")
    flow.write_paused = state == "write_paused"
    cycle.disconnected, cycle.response_complete = state == "disconnected", state == "response_complete"
    cycle.chunked_encoding = state != "not chunked"
    assert not chunks.is_free
    assert written.writes == [b"11\r\n0123456789abcdefg\r\n"]  # 17 bytes


def test_a_quiet_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.1)
    sent: list[Any] = []
    closed: list[int] = []

    async def quiet(num_comments: int) -> None:
        before = len(sent)
        while len(sent) < before + num_comments:
            await asyncio.sleep(0.01)

    async def events() -> AsyncIterator[bytes]:
        await quiet(3)  # the head goes with the first
        yield b"data: 1\n\n"
        await quiet(1)
        raise RuntimeError("no")

    async def main() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await StreamResponse(events(), lambda: closed.append(1), 10.0)(
            {"type": "http", "weft.on_disconnect": lambda call: None, "weft.chunks": SimpleNamespace(is_free=False)},
            receive,
            send,
        )
        await asyncio.sleep(0.3)

    asyncio.run(main())
    bodies = [message["body"] for message in sent[1:]]
    assert sent[0]["status"] == 200 and closed == [1]
    assert bodies[0] == PING and bodies.index(b"data: 1\n\n") >= 2 and bodies[-2] == PING
    assert json.loads(bodies[-1].split(b"\n")[0][6:])["error"]["type"] == "server_error"
    assert [message["more_body"] for message in sent[1:-1]] == [True] * len(sent[1:-1]) and "more_body" not in sent[-1]


def test_a_caller_that_has_gone_already_is_told_of() -> None:
    """Also where its connection closes before the handler of a request behind others runs."""
    calls: list[Any] = []
    cycle = SimpleNamespace(disconnected=False)
    protocol = object.__new__(connections.LimitedProtocol)
    protocol.transport = SimpleNamespace(is_closing=lambda: True)  # type: ignore[assignment]
    protocol.loop = SimpleNamespace(call_soon=calls.append)  # type: ignore[assignment]
    protocol.on_disconnect(cycle, lambda: calls.append("told"))  # type: ignore[arg-type]
    calls.pop()()
    assert calls == ["told"] and cycle.disconnected


def test_nothing_of_a_call_is_left_behind_it() -> None:
    """The timer and the disconnect callback are removed. Either would cancel what the task does next."""
    places: list[Any] = []

    async def main() -> None:
        with Watch({"weft.on_disconnect": places.append}, 0.01):
            assert len(places) == 1 and places[0] is not None
        await asyncio.sleep(0.03)

    asyncio.run(main())
    assert places[1:] == [None]


class Reader:
    """A caller that reads ``count`` messages and no more. ``stream`` is its call."""

    def __init__(self, count: int) -> None:
        self.num_sent, self._count = 0, count
        self.gone: list[Any] = []

    async def _send(self, message: Any) -> None:
        self.num_sent += 1
        if self.num_sent > self._count:
            await asyncio.Event().wait()

    def stream(self, *parts: bytes, timeout_s: float = 100.0) -> asyncio.Task[None]:
        async def events() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
                if part == b"waits":
                    await asyncio.Event().wait()

        response = StreamResponse(events(), lambda: None, timeout_s)
        chunks = SimpleNamespace(is_free=False)
        scope: Any = {"type": "http", "weft.on_disconnect": self.gone.append, "weft.chunks": chunks}
        return asyncio.create_task(response(scope, None, self._send))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "parts"),
    [(1, [b"data"]), (2, [b"data"]), (2, [b"data", sse.DONE]), (1, [b"waits"]), (2, [b"waits"])],
    ids=["an event", "the end", "the last event", "an event of many", "a comment"],
)
def test_a_caller_that_does_not_read_is_not_waited_for(
    count: int, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that does not read is not pinged again and again, and no task of its call keeps running."""
    monkeypatch.setattr(sse, "PING_S", 0.02)
    monkeypatch.setattr(sse, "_END_TIMEOUT_S", 0.1)
    is_end = count == 2 and b"waits" not in parts

    async def main() -> None:
        reader = Reader(count)
        call = reader.stream(*parts, timeout_s=100.0 if is_end else 0.2)
        await asyncio.wait_for(call, stretched(5))
        assert reader.num_sent <= count + 2, "what it does not read, and what ends it"
        del call
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_comment_that_is_not_read_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)

    async def main() -> None:
        reader = Reader(2)
        call = reader.stream(b"waits")
        while reader.num_sent < 3:
            await asyncio.sleep(0.005)
        reader.gone[0]()
        await asyncio.wait_for(call, stretched(5))
        del call
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_push_is_a_sign_of_life_and_waits_for_the_head() -> None:
    written: list[bytes] = []

    async def main() -> None:
        chunks = SimpleNamespace(is_free=True, write=written.append)
        sender = sse._Sender(None, chunks, [])  # type: ignore[arg-type]
        sender._last -= 100.0
        assert not sender.push(lambda deltas: pytest.fail("rendered before the head"), [])
        sender.started = True
        assert sender.push(lambda deltas: b"x", []) and written == [b"x"]
        assert sender.look() > sse.PING_S - 1 and sender._ping is None

    asyncio.run(main())


@pytest.mark.parametrize("ends", [["gone", "gone"], ["gone", "late"], ["late", "gone"]])
def test_a_call_that_ends_twice_at_once_ends_quietly(ends: list[str]) -> None:
    """A caller leaves as its time is over, and a connection that is closed is lost as well."""

    async def main() -> None:
        scope: Any = {"weft.on_disconnect": lambda call: None}
        with Watch(scope, 10.0) as watch:
            for end in ends:
                watch.allow(0.0)
                watch._gone() if end == "gone" else watch._wake()
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError as error:
                watch.reason(error)
        await asyncio.sleep(0)  # nothing is left to be raised

    asyncio.run(main())
