"""The two one-way sockets between the server process and the engine process.

Job: ZeroMQ on both sides, over Unix sockets in a private directory, or over TCP to an engine on another machine. Owns:
the sockets. Does not know: the meaning of messages (``wire.py``).

TCP connections are encrypted (CurveZMQ), and only a holder of the server's key can connect. Every channel has a new
key, which is never sent over the connection. The engine gets the key from whoever starts it.

The server's side binds, so the engine can connect at any time. Queues are not limited here: the server limits its
requests, and the engine sends at most one message per step.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from weft.engine import wire
from weft.errors import EngineDeadError

_MOST_AT_ONCE = 16

_LARGE = 1 << 20
"""Size in bytes from which a message (one with images) is sent without a copy."""

_AGAIN_S = 0.05
"""Seconds between two attempts to send to an engine that is not connected."""

_HEARTBEAT_MS, _SILENCE_MS = 1000, 10_000
"""Milliseconds between heartbeats over TCP, and milliseconds of silence after which a connection counts as broken."""


class Address(msgspec.Struct, frozen=True):
    """The address to which an engine connects. ``key``: the server's public key, for TCP."""

    requests: str
    outputs: str
    key: str | None = None


_OPEN: set[zmq.Context[zmq.Socket[bytes]]] = set()
"""Contexts of channels that are not closed. The end of a context waits for its sockets, so the garbage collector must
not end the context of an engine that was never shut down."""


class ServerChannel:
    """The server's side. Messages sent in one turn of the event loop travel as one message; received messages go to a
    callback.

    Args:
        where: a private directory for an engine on this machine, or this machine's IP address for one that may be on
            another. The operating system chooses the ports.
    """

    def __init__(self, where: Path | str) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        _OPEN.add(self._context)
        self._outputs = self._context.socket(zmq.PULL)
        self._requests = self._context.socket(zmq.PUSH)
        public, secret = zmq.curve_keypair() if isinstance(where, str) else (b"", b"")
        for socket, name in ((self._outputs, "outputs"), (self._requests, "requests")):
            socket.set_hwm(0)
            socket.linger = 0
            if secret:
                socket.curve_server, socket.curve_secretkey = True, secret
                socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
            socket.bind(f"tcp://{where}:*" if secret else f"ipc://{where}/{name}")
        ends = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self._requests, self._outputs)]
        self.address = Address(ends[0], ends[1], public.decode() or None)
        self._unsent: list[wire.ToEngine] = []
        self._receiver: Callable[[bytes], None] | None = None

    def send(self, message: wire.ToEngine) -> None:
        """Send a message, without blocking. If no engine is connected, either the engine has ended and the message is
        obsolete, or the engine is about to connect and gets the message then."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if not messages or self._requests.closed:
            return
        try:
            content = wire.encode_to_engine(messages)
            self._requests.send(content, zmq.NOBLOCK, copy=len(content) < _LARGE)
        except zmq.Again:
            self._unsent = messages
            self._loop.call_later(_AGAIN_S, self._flush)

    def receive(self, receiver: Callable[[bytes], None]) -> None:
        """Call ``receiver`` in the event loop with every message, encoded."""
        self._receiver = receiver
        self._loop.add_reader(self._outputs.fileno(), self._read)
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Read all waiting messages, since ZeroMQ signals new messages only once. After a while other tasks get their
        turn."""
        for _ in range(_MOST_AT_ONCE):
            if self._receiver is None:
                return
            try:
                content = self._outputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receiver(content)
        self._loop.call_soon(self._read)

    def stop_reading(self) -> None:
        if self._receiver is not None:
            self._receiver = None
            self._loop.remove_reader(self._outputs.fileno())

    def close(self) -> None:
        self.stop_reading()
        self._flush()
        self._outputs.close()
        self._requests.close()
        self._context.term()
        _OPEN.discard(self._context)


class EngineChannel:
    """The engine's side. It blocks only on request.

    Over TCP it detects broken connections: messages in transit are then lost, and neither side knows which.
    """

    def __init__(self, address: Address) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._outputs = self._context.socket(zmq.PUSH)
        self._breaks: list[zmq.Socket[bytes]] = []
        for socket, endpoint in ((self._requests, address.requests), (self._outputs, address.outputs)):
            socket.set_hwm(0)
            socket.linger = 1000  # milliseconds to deliver the last messages
            if address.key is not None:
                socket.curve_serverkey = address.key.encode()
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
                self._breaks.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            socket.connect(endpoint)

    def receive(self, timeout_ms: int) -> list[wire.ToEngine]:
        """Receive all waiting messages. If there are none, wait up to ``timeout_ms`` for the first one.

        Raises:
            EngineDeadError: the connection is broken.
        """
        if any(event.poll(0) for event in self._breaks):
            raise EngineDeadError("the connection to the server has broken")
        messages: list[wire.ToEngine] = []
        if not self._requests.poll(timeout_ms):
            return messages
        while True:
            try:
                messages += wire.decode_to_engine(self._requests.recv(zmq.NOBLOCK, copy=False).buffer)
            except zmq.Again:
                return messages

    def send(self, message: wire.FromEngine) -> None:
        self._outputs.send(wire.encode(message))

    def close(self) -> None:
        for event in self._breaks:
            event.close()
        self._requests.close()
        self._outputs.close()
        self._context.term()


class EngineStart(msgspec.Struct, frozen=True):
    """The standard input of the engine process: the address of the server and the user's settings.

    ``heartbeat``: the file of the heartbeat. ``parent_pid``: the parent; the engine exits with it. ``verbose``,
    ``log_json``: form of the log.
    """

    address: Address
    heartbeat: str
    parent_pid: int
    settings: dict[str, Any]
    verbose: bool = False
    log_json: bool = False
