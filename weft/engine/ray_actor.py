"""The Ray actor that starts an engine process on another machine and watches it.

Job: what a Ray actor runs: start the engine process, report its state, wait for its end. Owns: the process and its
heartbeat. Does not know: Ray, requests; messages go between server and engine directly.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from weft.engine.channel import EngineStart
from weft.engine.heartbeat import Pulse
from weft.engine.launcher import spawn


class EngineHost:
    """Its methods are called from the server's machine; ``beat`` while ``run`` runs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pulse: Pulse | None = None

    def run(self, content: bytes, module: str) -> int:
        """Run an engine from its start to its end, whose exit status is returned.

        Args:
            content: an ``EngineStart`` in msgpack; heartbeat and parent are filled in here.
            module: what ``python -m`` runs.
        """
        descriptor = os.memfd_create("weft-heartbeat")
        heartbeat = f"/proc/{os.getpid()}/fd/{descriptor}"  # no file that could be left behind
        start = replace(msgspec.msgpack.decode(content, type=EngineStart), heartbeat=heartbeat, parent_pid=os.getpid())
        self._pulse = Pulse(Path(heartbeat))
        self._process = spawn(start, module, {})
        return self._process.wait()

    def beat(self) -> tuple[int, float, float]:
        """The engine's process id (0: there is none yet), its silence in seconds (0.0 before its first sign of life),
        and this machine's monotonic clock."""
        if self._process is None or self._pulse is None:
            return 0, 0.0, time.monotonic()
        self._pulse.poll(self._process.pid)
        silence_s = self._pulse.silence_s
        return self._process.pid, silence_s if math.isfinite(silence_s) else 0.0, time.monotonic()
