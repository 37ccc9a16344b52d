"""A worker process of a ``WorkerPool``: ``python -m weft.server.worker DESCRIPTOR PARENT``.

It may be killed at any time. Its memory is limited to what it needs when idle plus a fixed amount.

One frame in, one out. First what to set up, then one task per frame.
"""

from __future__ import annotations

import os
import pickle
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.processes.lifeline import die_with_parent
from weft.server.worker_pool import FRAME, send

_NICENESS = 5


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    os.nice(_NICENESS)  # the event loop and the engine go first
    state: Any = None
    setup, arguments, memory_bytes = _read(link)
    try:
        state = setup(*arguments)
    except Exception as error:
        _refuse(link, error)
        return
    limit = _virtual_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    send(link, pickle.dumps((True, None)))
    while True:
        function, args = _read(link)
        try:
            value, blob = function(state, *args)
            content = pickle.dumps((True, value), pickle.HIGHEST_PROTOCOL)
        except MemoryError:
            os._exit(1)
        except Exception as error:
            _refuse(link, error)
        else:
            send(link, content, blob)
        value = blob = content = args = None


def _refuse(link: socket.socket, error: Exception) -> None:
    """Send an error that the caller caused as it is, and any other one as a text."""
    value = error if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"[:2000]
    send(link, pickle.dumps((False, value)))


def _read(link: socket.socket) -> Any:
    """The next frame's value. Ends the process when the parent has gone."""
    head = link.recv(FRAME.size, socket.MSG_WAITALL)
    if len(head) < FRAME.size:
        sys.exit(0)
    size, _ = FRAME.unpack(head)
    content = bytearray(size)
    view, filled = memoryview(content), 0
    while filled < size:
        count = link.recv_into(view[filled:])
        if not count:
            sys.exit(0)
        filled += count
    return pickle.loads(content)


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
