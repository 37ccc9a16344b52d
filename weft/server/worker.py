"""The main loop of every worker process of a ``WorkerPool``: frames in, a task each, frames out.

A worker may be killed at any time. Its memory is limited to its idle size plus a fixed amount.
"""

import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from weft.config.transport import decode_other, encode_other
from weft.errors import ContextLengthError, RequestError
from weft.processes.lifeline import die_with_parent

FRAME = struct.Struct("<QQ")
"""Sizes of a frame's two parts: a msgpack value, and the bytes beside it."""

Result = tuple[Any, bytes]
"""The result of a task: a small value, and bytes of any size."""

DONE = b"+"
"""The first byte of an answer that is a result. Any other answer is a ``Failure``."""

Run = Callable[[bytes, bytes], Result]
"""Runs a task, given as an encoded message and bytes beside it."""

_NICENESS = 5

encode = msgspec.msgpack.Encoder(enc_hook=encode_other).encode


class Setup(msgspec.Struct, frozen=True):
    """The first frame. ``content``: what the worker's own ``setup`` reads."""

    content: bytes
    memory_bytes: int


class Failure(msgspec.Struct, frozen=True):
    """Why a task failed.

    Attributes:
        is_refused: the caller is at fault; otherwise the code.
        is_too_long: the prompt does not fit into the context.
    """

    message: str
    is_refused: bool = False
    is_too_long: bool = False
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Self:
        if isinstance(error, RequestError):
            return cls(str(error), True, isinstance(error, ContextLengthError), error.param)
        return cls(f"{type(error).__name__}: {error}"[:2000])

    def error(self) -> Exception:
        if not self.is_refused:
            return RuntimeError(f"a worker failed: {self.message}")
        return (ContextLengthError if self.is_too_long else RequestError)(self.message, self.param)


def decode(content: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(content, type=kind, dec_hook=decode_other)


def send(link: socket.socket, content: bytes, blob: bytes = b"") -> None:
    """Write one frame."""
    link.sendall(FRAME.pack(len(content), len(blob)))
    link.sendall(content)
    if blob:
        link.sendall(blob)


def receive(link: socket.socket) -> tuple[bytes, bytes]:
    """Read one frame. Raises EOFError if the other end has gone, or OSError."""
    sizes = FRAME.unpack(_exactly(link, FRAME.size))
    return _exactly(link, sizes[0]), _exactly(link, sizes[1])


def _exactly(link: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes at once, which needs neither the interpreter lock nor a copy."""
    content = link.recv(size, socket.MSG_WAITALL) if size else b""
    if len(content) == size:
        return content
    parts, left = [content], size - len(content)
    while left:
        parts.append(link.recv(left))
        if not parts[-1]:
            raise EOFError("the other end has gone")
        left -= len(parts[-1])
    return b"".join(parts)


def serve(setup: Callable[[bytes], Run]) -> None:
    """Serve tasks until the parent ends: ``python -m MODULE DESCRIPTOR PARENT``.

    Args:
        setup: takes ``Setup.content`` and returns a function that runs a task.
    """
    link = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    os.nice(_NICENESS)  # the event loop and the engine go first
    try:
        first = decode(receive(link)[0], Setup)
        try:
            run = setup(first.content)
        except Exception as error:
            send(link, encode(Failure.of(error)))
            return
        idle_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = idle_bytes + first.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        send(link, DONE)
        while True:
            _answer(link, run, *receive(link))
    except (EOFError, OSError):
        return


def _answer(link: socket.socket, run: Run, task: bytes, task_blob: bytes) -> None:
    try:
        value, blob = run(task, task_blob)
        content = encode(value)
    except MemoryError:
        os._exit(1)
    except Exception as error:
        send(link, encode(Failure.of(error)))
    else:
        send(link, DONE + content, blob)
