"""Between the main process and one API process: messages in frames, over a pair of connected sockets.

Job: the messages that are not the engine's own (``engine/wire.py``), and the framing. Owns: both. Does not know: who
does what with them.

Towards the API process come the engine's messages as they are (``Configured``, ``Ready``, every ``Controlled``, and
``Outputs`` and ``Inspected`` of what it asked for), and those below. Back come messages to the engine, and those below.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from weft.config.transport import decode_other, encode_other
from weft.engine import wire
from weft.engine.snapshot import ReplicaView
from weft.request import RequestSpec
from weft.server.settings import ServerSettings


class ApiStart(msgspec.Struct, frozen=True):
    """The message that an API process reads from its standard input.

    Attributes:
        index: its number, from 0 on.
        first_number: of its requests and prompts; the next ones are ``settings.api_server_count`` further each.
        listen_fd, link_fd, counts_fd: descriptors that it has inherited: the listening socket, its end of the link, and
            the memory of ``OpenCounts``.
        is_another: it takes the place of one that has died.
    """

    settings: ServerSettings
    index: int
    first_number: int
    parent_pid: int
    listen_fd: int
    link_fd: int
    counts_fd: int
    is_another: bool
    verbose: bool


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The engine has ended; another one is started, or that was all."""

    failure: wire.Failed
    is_restarting: bool


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """The state of the engine, sent twice a second. ``silence_s``: seconds since its last sign of life, None before the
    first."""

    silence_s: float | None
    pid: int | None
    num_restarts: int
    replicas: list[ReplicaView] | None


class Open(msgspec.Struct, frozen=True, tag="open"):
    """All processes have said ``Serving``: take calls."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take nothing new, and leave when all processes have done what they had."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Send a ``Reported`` with this number: what this process has counted."""

    number: int
    what: str


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """The reports of the API processes, for the process that sent the ``Gather`` of this number."""

    number: int
    reports: list[bytes]


ToApi = (
    wire.Configured
    | wire.Ready
    | wire.Outputs
    | wire.Inspected
    | wire.Controlled
    | Lost
    | Pulse
    | Open
    | Drain
    | Report
    | Gathered
)


class Answering(msgspec.Struct, frozen=True, tag="answering"):
    """The sending process answers calls from now on, also if only to tell that the engine is starting."""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The sending process can accept calls."""


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """The sending process cannot serve with this engine, and no other process could."""

    failure: wire.Failed


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Ask every API process for a ``Report``, this one included."""

    number: int
    what: str


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """The report that was requested."""

    number: int
    content: bytes


FromApi = (
    RequestSpec
    | wire.FinishRequests
    | wire.Inspect
    | wire.DrainReplica
    | wire.StartReplica
    | wire.Control
    | Answering
    | Serving
    | Unfit
    | Gather
    | Reported
)

encode = msgspec.msgpack.Encoder(enc_hook=encode_other).encode
decode_to_api: Callable[[bytes], ToApi] = msgspec.msgpack.Decoder(ToApi, dec_hook=decode_other).decode
decode_from_api: Callable[[bytes], FromApi] = msgspec.msgpack.Decoder(FromApi, dec_hook=decode_other).decode

_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """One end of a link. Messages of one turn of the event loop are written together.

    Args:
        receive: takes each message, as bytes.
        lost: called when the other end has gone.
    """

    def __init__(self, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            self._receive(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]

    def send(self, message: Any) -> None:
        """Never blocks. If the other end has gone, so has what it was to do."""
        content = encode(message)
        if not self._unsent and self._transport is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (_LENGTH.pack(len(content)), content)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()
