"""The processes of the ranks other than 0, as rank 0 sees them.

Job: start them, notice that one has died or hangs, say which and what it said last, end them all. Owns: the processes,
and the threads that listen to them. Does not know: steps.

A rank that is gone leaves the others waiting for it in a collective. So the first failure ends all other ranks: on gloo
that closes their connections, on NCCL the communicator is aborted, and whoever waits gets an error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from weft.config import EngineConfig
from weft.errors import ConfigError, EngineDeadError, WeftError
from weft.executor.liveness import processor_s, waits_for_processor
from weft.executor.ring import Writer
from weft.executor.worker import FAILED_STATUS, Report, WorkerStart, decode_report, encode_start
from weft.parallel.process_group import abort_groups

logger = logging.getLogger(__name__)

HANG_S = 5.0
"""Seconds without a sign of life after which a rank counts as hanging."""

_LOOK_S = 0.25
_LAST_LINES = 20
_GRACE_S = 5.0


class Worker:
    """One process. Threads forward its standard error and collect its reports."""

    def __init__(self, start: WorkerStart, report: int) -> None:
        self.rank = start.rank
        self.stages: dict[str, float] = {}
        self.is_loaded, self.is_ready = threading.Event(), threading.Event()
        self.failed: Report | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        command = [sys.executable, "-m", "weft.executor.worker"]
        self.process = Popen(command, stdin=PIPE, stderr=PIPE, pass_fds=(start.report,))
        os.close(start.report)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(encode_start(start))
            self.process.stdin.close()
        self._threads = [
            threading.Thread(target=target, args=args, name=f"rank {self.rank}", daemon=True)
            for target, args in ((self._forward_errors, ()), (self._read_reports, (report,)))
        ]
        for thread in self._threads:
            thread.start()

    def _forward_errors(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="replace")
            self._last_lines.append(line.rstrip())
            sys.stderr.write(line)

    def _read_reports(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as file:
            for line in file:
                self._take(decode_report(line))

    def _take(self, report: Report) -> None:
        if report.kind == "stage":
            self.stages[report.text] = report.seconds
            self.is_loaded.set()
            logger.info("start-up of rank %d: %s %.2f s", self.rank, report.text, report.seconds)
        elif report.kind == "ready":
            self.is_ready.set()
        else:
            self.failed = report

    def last_words(self) -> str:
        """What it reported or printed last, once it has ended."""
        for thread in self._threads:
            thread.join(1.0)
        if self.failed is not None:
            return self.failed.text
        return "; its last lines: " + " | ".join(self._last_lines) if self._last_lines else "; it printed nothing"


class Workers:
    """All ranks but 0.

    Args:
        ring: of as many readers.
        num_threads, spin_s: see ``WorkerStart``.
    """

    def __init__(self, config: EngineConfig, ring: Writer, *, num_threads: int, spin_s: float) -> None:
        self._ring = ring
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        self.store = str(Path(self._folder.name) / "store")
        self._failure: WeftError | None = None
        self._is_stopping = threading.Event()
        self._used: dict[int, tuple[float, float]] = {}  # processor time, and when it last rose, by process id
        size = config.tensor_parallel_size
        verbose = logging.getLogger().isEnabledFor(logging.INFO)
        self.workers: list[Worker] = []
        for rank in range(1, size):
            read_end, write_end = os.pipe()
            start = WorkerStart(
                rank, size, config, ring.address, self.store, write_end, num_threads, spin_s, verbose=verbose
            )
            self.workers.append(Worker(start, read_end))
        self._watcher = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._watcher.start()

    # -- is everybody there? -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises EngineDeadError (or what a rank's settings are to blame for) if a rank has died or hangs."""
        if self._failure is not None:
            raise self._failure

    def failure(self, wait_s: float = 0.0) -> WeftError | None:
        """Why the ranks can do no more, if it is known, or becomes so within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._failure

    def fail(self, message: str, wait_s: float) -> None:
        """Something broke here. It is the end of all ranks, with this message unless another rank was the cause."""
        if self.failure(wait_s) is None:
            self._failure = EngineDeadError(message)
            self.kill()

    def wait_until_loaded(self) -> None:
        """Until every rank is about to join the group. Raises as ``check``."""
        self._wait([worker.is_loaded for worker in self.workers])

    def wait_until_ready(self) -> None:
        """Until every rank can run steps. Raises as ``check``."""
        self._wait([worker.is_ready for worker in self.workers])

    def _wait(self, events: list[threading.Event]) -> None:
        for event in events:
            while not event.wait(0.05):
                self.check()

    def _watch(self) -> None:
        while not self._is_stopping.wait(_LOOK_S):
            for worker in self.workers:
                status = worker.process.poll()
                if status is not None:
                    self._fail(worker, _ending(status))
                    return
                silence = self._silence_s(worker)
                if silence > HANG_S:
                    self._fail(worker, f"has given no sign of life for {silence:.0f} s")
                    return

    def _silence_s(self, worker: Worker) -> float:
        """Seconds in which the process neither beat nor used a processor nor waited for one."""
        pid, beat = self._ring.beats()[worker.rank - 1]
        now = time.monotonic()
        if not pid:  # it has not come far enough; loading libraries may take long
            return 0.0
        used, since = self._used.get(pid, (-1.0, now))
        if now - beat > 4 * _LOOK_S:
            try:
                current = processor_s(pid)
                if current != used or waits_for_processor(pid):
                    since = now
            except OSError:
                current = used
            self._used[pid] = (current, since)
            return now - max(beat, since)
        self._used[pid] = (used, now)
        return 0.0

    def _fail(self, worker: Worker, what: str) -> None:
        if self._is_stopping.is_set():
            return
        worker.process.kill()
        worker.process.wait()
        words = worker.last_words()
        if worker.failed is not None:
            kind = ConfigError if worker.failed.user_error else EngineDeadError
            self._failure = kind(f"rank {worker.rank} of the model failed: {words}")
        else:
            name = f"rank {worker.rank} of the model (process {worker.process.pid})"
            self._failure = EngineDeadError(f"{name} {what}{words}")
        logger.error("%s", self._failure)
        self.kill()
        abort_groups()

    # -- the end -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End all processes now."""
        self._is_stopping.set()
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGKILL)
            worker.process.wait()

    def wait(self) -> None:
        """They were told to leave; kill those that do not."""
        self._is_stopping.set()
        deadline = time.monotonic() + _GRACE_S
        for worker in self.workers:
            with suppress(TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        self._folder.cleanup()


def _ending(status: int) -> str:
    if status == FAILED_STATUS:
        return "failed"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
