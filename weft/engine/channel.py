"""The two one-way sockets between the server process and the engine process.

Job: ZeroMQ, on either side: over Unix sockets in a private directory, or over TCP to an engine on another machine.
Owns: the sockets. Does not know: what messages mean (``wire.py``).

Over TCP everything is encrypted (CurveZMQ), and only who holds the server's key can connect: it is made anew for every
channel, never stands on the wire, and reaches the engine through whoever starts it.

The server's side binds, so that the engine can connect whenever it is up. Nothing is limited here: the server bounds
what it lets in, and the engine sends at most one message per step.
"""

from __future__ import annotations

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
"""Bytes from which on a message, one with images, is sent from where it stands."""

_AGAIN_S = 0.05
"""Seconds between two tries to send to an engine that is not connected."""

_HEARTBEAT_MS, _SILENCE_MS = 1000, 10_000
"""Over TCP: how often each end asks for a sign of life, and after how long without one the connection has broken."""


class Address(msgspec.Struct, frozen=True):
    """Where an engine connects to. ``key``: the server's public key, for TCP."""

    requests: str
    outputs: str
    key: str | None = None


class ServerChannel:
    """The server's side: what is sent in one turn of the event loop goes as one message; what comes calls back.

    Args:
        where: a private directory, for an engine on this machine; or this machine's IP address, for one that may be on
            another. The operating system chooses the ports.

    Attributes:
        address: what the engine has to know.
    """

    def __init__(self, where: Path | str) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
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
        """Never blocks. If nobody is connected, the engine has gone, and what it was to do has gone with it, or it is
        still about to connect, and gets it then."""
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
        """From now on ``receiver`` gets every message, encoded, in the event loop."""
        self._receiver = receiver
        self._loop.add_reader(self._outputs.fileno(), self._read)
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Everything that is there: ZeroMQ signals a new message once. After a while others get their turn."""
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
        """Nothing more is read."""
        if self._receiver is not None:
            self._receiver = None
            self._loop.remove_reader(self._outputs.fileno())

    def close(self) -> None:
        self.stop_reading()
        self._flush()
        self._outputs.close()
        self._requests.close()
        self._context.term()


class EngineChannel:
    """The engine's side: blocks only when asked to.

    Over TCP it looks for breaks: what was on its way then is lost, and neither side knows what.
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
        """Every message that is there; if there is none, wait up to ``timeout_ms`` for the first.

        Raises:
            EngineDeadError: the connection has broken.
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
    """What the engine process reads from its standard input: where to connect and the user's settings.

    ``heartbeat``: the file that it keeps fresh. ``parent_pid``: the engine leaves when this process is gone.
    ``verbose``, ``log_json``: how it logs.
    """

    address: Address
    heartbeat: str
    parent_pid: int
    settings: dict[str, Any]
    verbose: bool = False
    log_json: bool = False
