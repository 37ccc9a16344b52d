"""The heartbeat of the engine process, in a file that both processes map.

A thread of its own writes the heartbeat, so a step may take any time. The thread itself can be delayed by a long call
that holds the interpreter lock, or by a busy machine. The server therefore also asks the kernel about the process. A
process that uses processor time, or waits for a processor, is not frozen. A process is frozen if it is stopped, stuck
in the kernel, or in a deadlock.
"""

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
    """The engine's side. With ``parent_pid`` other than 0 the process exits as soon as that parent is gone."""

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
                os._exit(1)  # without a parent there is nobody to serve and nothing to save
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
        """Seconds since the last sign of life: a heartbeat, or a movement that ``poll`` saw. Infinite before the first
        heartbeat."""
        beat = self._last_beat()
        return time.monotonic() - max(beat, self._movement.at) if beat else float("inf")

    def poll(self, pid: int) -> None:
        """Check whether the process moves without a heartbeat. Call it about once a second."""
        self._movement.look(pid, is_quiet=time.monotonic() - self._last_beat() > 4 * BEAT_S)

    def _last_beat(self) -> float:
        (moment,) = _LAYOUT.unpack(self._memory[: _LAYOUT.size])
        return float(moment)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _LAYOUT.size)
