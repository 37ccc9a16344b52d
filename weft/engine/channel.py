"""The two one-way sockets between the server process and the engine process.

Job: ZeroMQ over Unix sockets in a private directory, on either side. Owns: the sockets.
Does not know: what messages mean (``wire.py``).

The server's side binds, so that the engine can connect whenever it is up. Nothing is limited here: the server bounds
what it lets in, and the engine sends at most one message per step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from weft.engine import wire

_MOST_AT_ONCE = 16


def _address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}"


class ServerChannel:
    """The server's side: what is sent in one turn of the event loop goes as one message; what comes calls back."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._requests = self._context.socket(zmq.PUSH)
        for socket, name in ((self._outputs, "outputs"), (self._requests, "requests")):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(_address(directory, name))
        self._unsent: list[wire.ToEngine] = []
        self._receiver: Callable[[bytes], None] | None = None

    def send(self, message: wire.ToEngine) -> None:
        """Never blocks. If nobody is connected the engine has gone, and what it was to do has gone with it."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and not self._requests.closed:
            with contextlib.suppress(zmq.Again):
                self._requests.send(wire.encode(messages), zmq.NOBLOCK)

    def receive(self, receiver: Callable[[bytes], None]) -> None:
        """From now on ``receiver`` gets every message, encoded, in the event loop."""
        self._receiver = receiver
        self._loop.add_reader(self._outputs.fileno(), self._read)
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Everything that is there: ZeroMQ's descriptor tells of news once, not of what is left. After a while others
        get their turn."""
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
    """The engine's side: blocks only when asked to."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._outputs = self._context.socket(zmq.PUSH)
        for socket, name in ((self._requests, "requests"), (self._outputs, "outputs")):
            socket.set_hwm(0)
            socket.linger = 1000  # milliseconds to deliver the last messages
            socket.connect(_address(directory, name))

    def receive(self, timeout_ms: int) -> list[wire.ToEngine]:
        """Every message that is there; if there is none, wait up to ``timeout_ms`` for the first."""
        messages: list[wire.ToEngine] = []
        if not self._requests.poll(timeout_ms):
            return messages
        while True:
            try:
                messages += wire.decode_to_engine(self._requests.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def send(self, message: wire.FromEngine) -> None:
        self._outputs.send(wire.encode(message))

    def close(self) -> None:
        self._requests.close()
        self._outputs.close()
        self._context.term()


class EngineStart(msgspec.Struct, frozen=True):
    """What the engine process reads from its standard input: where to connect and the user's settings.

    ``parent_pid``: the engine leaves when this process is gone.
    """

    directory: str
    parent_pid: int
    settings: dict[str, Any]
    verbose: bool = False
