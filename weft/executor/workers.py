"""Supervision of all ranks other than 0: start, heartbeats, end.

Job: notice that a rank has died or hangs, report it with its last words, end all ranks. Owns: the processes, and the
thread that watches them. Does not know: steps, or who started the processes.

A dead rank leaves the others waiting for it in a collective. The first failure therefore ends all other ranks. On gloo
that closes their connections, on NCCL the communicator is aborted, and every waiting thread gets an error.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from weft.errors import ConfigError, EngineDeadError, WeftError
from weft.executor.rank_process import RankProcess
from weft.executor.ring import Writer
from weft.parallel.process_group import abort_groups
from weft.processes.heartbeat import BEAT_S
from weft.processes.liveness import Movement

logger = logging.getLogger(__name__)

HANG_S = 5.0
"""Seconds without a sign of life after which a rank counts as hanging."""

_LOOK_S = 0.25
_GRACE_S = 5.0


class Workers:
    """All ranks other than 0."""

    def __init__(self, ranks: Sequence[RankProcess], ring: Writer) -> None:
        self.ranks = ranks
        self._ring = ring
        self._failure: WeftError | None = None
        self._is_stopping = threading.Event()
        self._movements: dict[int, Movement] = {}  # by process id
        self._watcher = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raise EngineDeadError, or the error of a rank's settings, if a rank has died or hangs."""
        if self._failure is not None:
            raise self._failure

    def failure(self, wait_s: float = 0.0) -> WeftError | None:
        """The reason why the ranks cannot go on, if known within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._failure

    def fail(self, message: str, wait_s: float) -> None:
        """End all ranks after an error on rank 0. The message is used unless another rank was the cause."""
        if self.failure(wait_s) is None:
            self._failure = EngineDeadError(message)
            self.kill()

    def wait_until_loaded(self) -> None:
        """Wait until every rank is about to join the group. Raises as ``check``."""
        self._wait(lambda worker: worker.is_loaded)

    def wait_until_ready(self) -> None:
        """Wait until every rank can run steps. Raises as ``check``."""
        self._wait(lambda worker: worker.is_ready)

    def _wait(self, condition: Callable[[RankProcess], bool]) -> None:
        while not all(map(condition, self.ranks)):
            self.check()
            time.sleep(0.02)

    def _watch(self) -> None:
        while not self._is_stopping.wait(_LOOK_S):
            for worker in self.ranks:
                if (ending := worker.ending()) is not None:
                    self._fail(worker, ending)
                    return
                silence = self._silence_s(worker)
                if silence > HANG_S:
                    self._fail(worker, f"has given no sign of life for {silence:.0f} s")
                    return

    def _silence_s(self, worker: RankProcess) -> float:
        """Seconds without a heartbeat in which the process neither used nor waited for a processor."""
        pid, beat = self._ring.beats()[worker.rank - 1]
        now = time.monotonic()
        if not pid or now - beat <= 4 * BEAT_S:  # it still loads libraries, or beats
            return 0.0
        movement = self._movements.setdefault(pid, Movement())
        movement.look(pid, is_quiet=True)
        return now - max(beat, movement.at)

    def _fail(self, worker: RankProcess, what: str) -> None:
        if self._is_stopping.is_set():
            return
        worker.kill()
        words = worker.last_words()
        if worker.failed is not None:
            kind = ConfigError if worker.failed.user_error else EngineDeadError
            self._failure = kind(f"rank {worker.rank} of the model failed: {words}")
        else:
            name = f"rank {worker.rank} of the model (process {worker.pid})"
            self._failure = EngineDeadError(f"{name} {what}{words}")
        logger.error("%s", self._failure)
        self.kill()
        abort_groups()

    def kill(self) -> None:
        self._is_stopping.set()
        for worker in self.ranks:
            worker.kill()

    def end(self) -> None:
        """Kill all processes, and stop reading the ring."""
        self.kill()
        self._watcher.join(_GRACE_S)

    def may_leave(self) -> None:
        """Note that the ranks were asked to stop, so their ends are no failures."""
        self._is_stopping.set()

    def wait(self) -> None:
        """Wait for ranks that were asked to stop, and kill those that do not."""
        self._is_stopping.set()
        deadline = time.monotonic() + _GRACE_S
        for worker in self.ranks:
            worker.wait(max(0.0, deadline - time.monotonic()))
        self.end()
