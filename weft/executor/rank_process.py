"""The process of one rank other than 0, as rank 0 sees it.

Job: two kinds, a child process of rank 0 and a process that a launcher started. Owns: the child process and its
reports. Does not know: steps, other ranks.
"""

import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.config.parallelism import is_launched
from weft.executor.ring import Writer
from weft.executor.worker import FAILED_STATUS, Report, WorkerStart, decode_report, encode_start
from weft.processes.child import Child
from weft.processes.liveness import is_alive
from weft.processes.preload import create_cuda_context

logger = logging.getLogger(__name__)

_MOST_EARLY = 8
"""Upper bound on the ranks that start before the number of GPUs is known."""


class RankProcess(ABC):
    """A rank.

    Attributes:
        stages: seconds of the stages of its start, as far as known.
        failed: its report about a failure.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stages: dict[str, float] = {}
        self.failed: Report | None = None

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id; 0 if unknown so far."""

    @property
    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether the rank is about to join the group."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the rank can run steps."""

    @abstractmethod
    def ending(self) -> str | None:
        """How the process ended, as the end of a sentence; None while it runs."""

    @abstractmethod
    def last_words(self) -> str:
        """The last report or output of a process that has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process, and wait for its end."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the end of the process."""


class StartedRank(RankProcess):
    """A child process of this one. It loads its libraries, and waits for ``begin``."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        read_end, self._reports = os.pipe()
        self._is_ready = False
        self._child = Child("weft.executor.worker", pass_fds=(self._reports,), forwards_errors=True)
        os.close(self._reports)
        self._child.listen(os.fdopen(read_end, "rb"), lambda line: self._take(decode_report(line)))

    def begin(self, start: WorkerStart, store: str) -> None:
        """Tell the process which rank it is. ``store``: the file through which ranks find each other."""
        self._child.send(encode_start((start, self.rank, store, self._reports)))

    def _take(self, report: Report) -> None:
        if report.kind == "stage":
            self.stages[report.text] = report.seconds
            logger.info("start-up of rank %d: %s %.2f s", self.rank, report.text, report.seconds)
        elif report.kind == "ready":
            self._is_ready = True
        else:
            self.failed = report

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_loaded(self) -> bool:
        return bool(self.stages)

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    def ending(self) -> str | None:
        status = self._child.status
        if status is None:
            return None
        if status == FAILED_STATUS:
            return "failed"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        self._child.end()

    def wait(self, seconds: float) -> None:
        self._child.wait(seconds)

    def last_words(self) -> str:
        lines = self._child.last_lines()
        if self.failed is not None:
            return self.failed.text
        return "; its last lines: " + " | ".join(lines) if lines else "; it printed nothing"


def begin_start(settings: Mapping[str, Any]) -> list[StartedRank]:
    """Begin the parts of a start that need no resolved settings: create the CUDA context, and start the other ranks.

    Returns:
        The processes of the ranks that these settings certainly need. They load libraries meanwhile. Empty if that is
        uncertain; ``MultiProcessExecutor`` starts them then. They end with this process, or earlier if the caller ends
        them.
    """
    if settings.get("device") != "cpu" and not is_launched():
        create_cuda_context()
    size, backend = settings.get("tensor_parallel_size"), settings.get("distributed_executor_backend")
    if not isinstance(size, int) or not 1 < size <= _MOST_EARLY or backend not in (None, "mp") or is_launched():
        return []
    return [StartedRank(rank) for rank in range(1, size)]


class SiblingRank(RankProcess):
    """A process that was not started by this one, but has the same parent or owner. Its heartbeat has its process
    id."""

    def __init__(self, rank: int, ring: Writer) -> None:
        super().__init__(rank)
        self._ring = ring

    @property
    def pid(self) -> int:
        return self._ring.beats()[self.rank - 1][0]

    @property
    def is_loaded(self) -> bool:
        return self.pid > 0

    @property
    def is_ready(self) -> bool:
        return True  # the group has formed once rank 0 is ready

    def ending(self) -> str | None:
        return None if not self.pid or is_alive(self.pid) else "has ended"

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(5.0)

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.pid and is_alive(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)

    def last_words(self) -> str:
        return "; its launcher has what it printed"
