"""The engine process's heartbeat, in a file that both processes map.

The beat comes from a thread of its own, so a step may take as long as it likes. That thread may still be kept waiting,
by a long call that holds the interpreter lock, or because the machine has no processor to spare. So the server also
looks at what the kernel knows of the process: one that uses processor time, or waits for a processor, is not frozen.
Frozen is what stands still: stopped, stuck in the kernel, in a deadlock.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

from weft.processes.liveness import Movement

BEAT_S = 0.25
"""Seconds between two beats."""

_LAYOUT = struct.Struct("<d")  # time of the last beat


class Heartbeat:
    """The engine's side. ``parent_pid``: the process exits at once when that parent is gone; 0: never."""

    def __init__(self, path: Path, parent_pid: int = 0) -> None:
        self._memory = _map(path)
        self._parent_pid = parent_pid
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._write()
        self._thread.start()

    def _beat(self) -> None:
        while True:
            self._write()
            if self._parent_pid and os.getppid() != self._parent_pid:
                os._exit(1)  # nobody is left to serve; nothing here is worth saving
            time.sleep(BEAT_S)

    def _write(self) -> None:
        self._memory[: _LAYOUT.size] = _LAYOUT.pack(time.monotonic())


class Pulse:
    """The server's side of a heartbeat."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.size))
        self._memory = _map(path)
        self._movement = Movement()

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign of life, a beat or what ``poll`` saw; infinite before the first beat."""
        beat = self._last_beat()
        return time.monotonic() - max(beat, self._movement.at) if beat else float("inf")

    def poll(self, pid: int) -> None:
        """See whether the process moves without a beat; for a caller that looks about once a second."""
        self._movement.look(pid, is_quiet=time.monotonic() - self._last_beat() > 4 * BEAT_S)

    def _last_beat(self) -> float:
        (moment,) = _LAYOUT.unpack(self._memory[: _LAYOUT.size])
        return float(moment)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _LAYOUT.size)
