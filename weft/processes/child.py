"""A child process as its parent sees it: started, watched, ended, and perhaps started again.

Job: run ``python -m MODULE``, write standard input, read output, report the exit, kill and reap the process. Owns: the
process, and the threads that wait for it. Does not know: what the child does, or what its messages mean.

The child's side is in ``lifeline.py`` (the end of the parent) and ``heartbeat.py`` (signs of life).
"""

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO

MAX_RESTARTS_IN_A_ROW = 3
"""Restarts without a stable run in between, after which no other process is started."""

STABLE_AFTER_S = 60.0
"""Seconds after which a ready process counts as stable. Its restarts are then counted from zero again."""

_MAX_LAST_LINES = 20
"""Lines of a child's standard error that are kept for a message about its end."""

_READ_S = 1.0
"""Seconds to wait for the last lines of a child that has ended."""


class Child:
    """A child process that runs ``python -m module``.

    Args:
        arguments: its command-line arguments.
        environment: variables besides those of this process.
        pass_fds: descriptors that the child inherits.
        forwards_errors: write the child's standard error to this process's, and keep its last lines.
        in_background: the child has no standard input and output, and a session of its own: a Ctrl-C in the terminal
            does not reach it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
        forwards_errors: bool = False,
        in_background: bool = False,
    ) -> None:
        self._module = module
        self._process = Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=DEVNULL if in_background else PIPE,
            stdout=DEVNULL if in_background else None,
            stderr=PIPE if forwards_errors else None,
            env=None if environment is None else os.environ | environment,
            pass_fds=pass_fds,
            start_new_session=in_background,
        )
        self._lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
        self._readers: list[threading.Thread] = []
        if self._process.stderr is not None:
            self.listen(self._process.stderr, self._forward)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def send(self, content: bytes) -> None:
        """Write the whole standard input of the child and close it. The exit of a dead child is reported elsewhere."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(content)

    def listen(self, file: IO[bytes], take: Callable[[bytes], object]) -> None:
        """Pass each line of ``file`` to ``take`` in a thread, until the child closes its end. Closes ``file``."""

        def read() -> None:
            with file:
                for line in file:
                    take(line)

        thread = threading.Thread(target=read, name=f"reads {self._module}", daemon=True)
        self._readers.append(thread)
        thread.start()

    def last_lines(self) -> list[str]:
        """The last lines on the standard error of a child that has ended."""
        for thread in self._readers:
            thread.join(_READ_S)
        return list(self._lines)

    def _forward(self, raw: bytes) -> None:
        line = raw.decode(errors="replace")
        self._lines.append(line.rstrip())
        with suppress(OSError, ValueError):  # without a reader here, the child must not block on a full pipe
            sys.stderr.write(line)

    def on_exit(self, loop: asyncio.AbstractEventLoop, call: Callable[[int], object]) -> None:
        """Call ``call`` with the exit status, in the event loop, when the process has ended."""

        def watch() -> None:
            status = self._process.wait()
            with suppress(RuntimeError):  # the event loop is closed, so nobody waits for the status
                loop.call_soon_threadsafe(call, status)

        threading.Thread(target=watch, name=f"waits for {self._module}", daemon=True).start()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end of the process. Returns None if the process still runs after ``seconds``."""
        with suppress(TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kill the process if it runs, and return at once."""
        if self._process.poll() is None:
            self._process.kill()

    def end(self) -> None:
        """Kill the process if it runs, reap it, and close its standard input."""
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    return f"signal {-status}" if status < 0 else f"status {status}"


@dataclass(slots=True)
class Restarts:
    """The decision whether a process that died is started again.

    Attributes:
        num: restarts so far.
        num_in_a_row: restarts since the last stable run.
        ready_at: when the process became ready, of ``time.monotonic()``; None before.
    """

    num: int = 0
    num_in_a_row: int = 0
    ready_at: float | None = None

    def ready(self) -> None:
        """Note that the process can work now."""
        self.ready_at = time.monotonic()

    def allowed(self) -> bool:
        """Decide after a death whether to start another process, and count the restart.

        A process that was never ready is not restarted: the next one would fail as well.
        """
        if self.ready_at is not None and time.monotonic() - self.ready_at > STABLE_AFTER_S:
            self.num_in_a_row = 0
        was_ready, self.ready_at = self.ready_at is not None or self.num > 0, None
        if not was_ready or self.num_in_a_row >= MAX_RESTARTS_IN_A_ROW:
            return False
        self.num, self.num_in_a_row = self.num + 1, self.num_in_a_row + 1
        return True
