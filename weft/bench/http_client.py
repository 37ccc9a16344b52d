"""A small HTTP/1.1 client for load: one connection per request in flight, answers read as they arrive.

Job: POST a JSON body and yield the data of server-sent events, at little cost per event. Owns: the framing of HTTP.
Does not know: the content. A library would spend more time per event than the servers under test.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from weft.errors import ConfigError

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_LINE_LIMIT = 1 << 20


class HttpError(Exception):
    """A status other than 200, with the beginning of the body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:200]}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. ``base`` is the URL up to and including ``/v1``."""

    host: str
    port: int
    base: str
    secure: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Self:
        """Parse a URL. Raises ConfigError for anything but an http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url}: give something like http://127.0.0.1:8000/v1")
        secure = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if secure else 80), parts.path.rstrip("/"), secure, api_key)

    def head(self, path: str, length: int) -> bytes:
        lines = [
            f"POST {self.base}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


class HttpClient:
    """Keeps connections for reuse."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Open or reuse a connection. It is kept afterwards only if nothing failed and neither side has closed it."""
        connection = self._reused()
        if connection is None:
            target = self._target
            connection = await asyncio.open_connection(
                target.host, target.port, ssl=target.secure or None, limit=_LINE_LIMIT
            )
        try:
            yield connection
        except BaseException:
            connection[1].close()
            raise
        if not connection[1].is_closing():
            self._idle.append(connection)

    def _reused(self) -> Connection | None:
        """An idle connection; None if the server has closed them all."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    async def events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Yield the data of the answer's events, without ``[DONE]``.

        Raises:
            HttpError: the server refused the request.
            OSError, EOFError: the connection broke.
        """
        async with self._connection() as (reader, writer):
            writer.write(self._target.head(path, len(body)) + body)
            status, headers = await _read_head(reader)
            chunks = _body(reader, headers)
            if status != 200:
                raise HttpError(status, b"".join([chunk async for chunk in chunks]).decode("utf-8", "replace"))
            rest = b""
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data: ").rstrip(b"\r")
                    if line.startswith(b"data: ") and data != b"[DONE]":
                        yield data
            if headers.get("connection", "").lower() == "close":
                writer.close()

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    version, status = lines[0].split()[:2]
    kept = {} if version == "HTTP/1.1" else {"connection": "close"}
    return int(status), kept | {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" not in headers.get("transfer-encoding", ""):
        yield await reader.readexactly(int(headers.get("content-length", "0")))
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
