"""Worker processes for requests that would keep the event loop waiting: large bodies, and pictures.

Job: run tasks in child processes that may be killed, within limits on processor time and memory, in fair order.
Owns: the processes. Does not know: what a task does.

A thread cannot do this work: most of it holds the interpreter lock. Each process belongs to a thread of this process,
which waits for it without the lock. Large results come back as bytes beside a small value.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from weft.errors import RequestError
from weft.processes.child import Child
from weft.processes.liveness import processor_s
from weft.server.errors import ApiError
from weft.server.worker import DONE, Failure, Setup, decode, encode, receive, send

logger = logging.getLogger(__name__)

Answer = tuple[bytes, bytes]
"""The encoded value of a result, and the bytes beside it."""

_POLL_MS = 50
_PATIENCE = 20
"""A task is cancelled after this many times its limit on processor time, measured by the clock."""


_GIVES_WAY_S = 5.0
"""Seconds for which small tasks pass a large one of the same caller."""


class TooSlowError(RequestError):
    """A task took more processor time than its limit."""


class WorkerDiedError(RequestError):
    """A process died during a task, most likely because the task took too much memory."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Program and limits of the processes of a pool.

    Attributes:
        name: a name for threads and messages.
        module: the module that ``python -m`` runs. It calls ``worker.serve``.
        setup: the encoded argument of the module's ``setup``.
        memory_bytes: address space that a task may take beyond that of the idle process.
        limit_s: processor time that a task may take.
        small: tasks of at most this size are small.
    """

    name: str
    module: str
    setup: bytes
    memory_bytes: int
    limit_s: float
    small: int


@dataclass(slots=True, eq=False)
class _Task:
    content: bytes
    blob: bytes
    caller: str
    is_large: bool
    param: str
    number: int
    began: float = field(default_factory=time.monotonic)
    future: Future[Answer] = field(default_factory=Future)
    is_cancelled: bool = False


class WorkerPool:
    """Processes of one kind, started when they are needed.

    All but one may run large tasks at a time, so that a small task never waits for large ones alone. The caller
    with the fewest running tasks goes first. Small tasks of a caller pass its large ones.

    Args:
        num_workers: upper bound on processes, at least two.
    """

    def __init__(self, kind: WorkerKind, num_workers: int = 2) -> None:
        assert num_workers >= 2
        self._kind = kind
        self._num_workers = num_workers
        self._changed = threading.Condition()
        self._waiting: list[_Task] = []
        self._running: Counter[str] = Counter()
        self._num_large = self._num_idle = 0
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start all processes, so that the first tasks need not wait."""
        with self._changed:
            while len(self._threads) < self._num_workers:
                self._add_thread()

    async def run(
        self,
        task: msgspec.Struct,
        blob: bytes = b"",
        *,
        caller: str = "",
        size: int = 0,
        param: str = "messages",
    ) -> Answer:
        """Run a task in a worker.

        Args:
            task: a message that the worker's module knows.
            blob: bytes of any size for the task, which are sent without a copy.
            caller: the caller, each of which gets a fair share of the workers.
            size: how large the task is, in the unit of ``WorkerKind.small``.
            param: the request's field that errors blame.

        Returns:
            The encoded value of the result, and the bytes beside it.

        Raises:
            RequestError: what the task raised, or that it took too long or too much memory.
            ApiError: 503, the machine is too busy for the task.
        """
        queued = _Task(encode(task), blob, caller, size > self._kind.small, param, next(self._numbers))
        with self._changed:
            self._waiting.append(queued)
            if self._num_idle < len(self._waiting) and len(self._threads) < self._num_workers:
                self._add_thread()
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(queued.future)
        except asyncio.CancelledError:
            with self._changed:
                queued.is_cancelled = True
                if queued in self._waiting:
                    self._waiting.remove(queued)
            raise

    def _add_thread(self) -> None:
        name = f"{self._kind.name} {len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Run tasks in one worker until the pool is closed."""
        worker = Worker(self._kind)
        with self._changed:
            self._workers.add(worker)
        with contextlib.suppress(Exception):  # the first task tries again, and tells its caller
            worker.ensure()
        while (task := self._next()) is not None:
            result: Answer | Exception
            try:
                result = worker.call(task)
            except Exception as error:
                result = error
            with self._changed:
                self._running[task.caller] -= 1
                self._running += Counter()  # without those that have none
                self._num_large -= task.is_large
                self._changed.notify_all()
            with contextlib.suppress(Exception):  # the caller may have gone meanwhile
                if isinstance(result, Exception):
                    task.future.set_exception(result)
                else:
                    task.future.set_result(result)
        worker.kill()

    def _next(self) -> _Task | None:
        """Wait for a task that may run. Returns None once the pool is closed."""
        with self._changed:
            self._num_idle += 1
            while not self._is_closed:
                allowed = [t for t in self._waiting if not t.is_large or self._num_large < self._num_workers - 1]
                if allowed:
                    task = min(allowed, key=self._turn)
                    self._waiting.remove(task)
                    self._running[task.caller] += 1
                    self._num_large += task.is_large
                    self._num_idle -= 1
                    return task
                self._changed.wait()
            return None

    def _turn(self, task: _Task) -> tuple[int, bool, int]:
        gives_way = task.is_large and time.monotonic() - task.began < _GIVES_WAY_S
        return self._running[task.caller], gives_way, task.number

    def close(self) -> None:
        """End the processes at once."""
        with self._changed:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()


class Worker:
    """One process and the socket to it; used by one thread, but ``kill`` may be called by any."""

    def __init__(self, kind: WorkerKind) -> None:
        self._kind = kind
        self._process: Child | None = None
        self._socket: socket.socket | None = None

    def ensure(self) -> socket.socket:
        """Start the process if none runs. Raises the error of its setup, or of its death during the setup.

        A process that died between two tasks is replaced here, so that the next task is not blamed for it.
        """
        if self._socket is not None and self._process is not None and self._process.status is None:
            return self._socket
        self.kill()
        ours, theirs = socket.socketpair()
        self._process = Child(
            self._kind.module,
            str(theirs.fileno()),
            str(os.getpid()),
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=(theirs.fileno(),),
            in_background=True,
        )
        theirs.close()
        self._socket = ours
        kind = self._kind
        send(ours, encode(Setup(kind.setup, kind.memory_bytes)))
        answer = _answer(ours)
        if isinstance(answer, Exception):
            self.kill()
            raise answer
        return ours

    def call(self, task: _Task) -> Answer | Exception:
        """Run one task. Returns its result or its error, which says so if the task exceeded a limit.

        The limit is one of processor time. On a busy machine a task may wait long for its turn, which is no fault of
        the caller's.
        """
        kind, name = self._kind, self._kind.name
        try:
            link = self.ensure()
            assert self._process is not None
            pid = self._process.pid
            used = processor_s(pid)
            send(link, task.content, task.blob)
            waiter = select.poll()
            waiter.register(link, select.POLLIN)
            for _ in range(int(_PATIENCE * kind.limit_s * 1e3 / _POLL_MS)):
                if waiter.poll(_POLL_MS):
                    return _answer(link)
                if task.is_cancelled or processor_s(pid) - used > kind.limit_s:
                    self.kill()
                    limit = f"{kind.limit_s:g} s of processor time"
                    return TooSlowError(f"{name} take longer than {limit}; send less", task.param)
            self.kill()
            message = f"the process for {name} does not answer; the machine may be overloaded, try again later"
            return ApiError(503, message, type="server_error", code="busy", retry_after_s=1)
        except (OSError, EOFError) as error:
            self.kill()
            logger.warning("a worker for %s has died (%s)", name, error)
            return WorkerDiedError(f"{name} take more memory than there is for them; send less", task.param)

    def kill(self) -> None:
        process, self._process = self._process, None
        link, self._socket = self._socket, None
        if process is not None:
            process.end()
        if link is not None:
            link.close()


def _answer(link: socket.socket) -> Answer | Exception:
    """Read the result of a task, or its error."""
    content, blob = receive(link)
    if content[:1] == DONE:
        return content[1:], blob
    return decode(content, Failure).error()
