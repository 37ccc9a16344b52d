"""Chat templates and tokenization, off the event loop.

Job: run both in threads, and stop a template that runs too long. Owns: the threads. Does not know: HTTP, sampling.

Templates are programs of the checkpoint, run in jinja2's immutable sandbox. The conversation decides how long a
template takes. Tokenizers release the interpreter lock, so threads are enough. One thread is always left for small
inputs, since large inputs are processed one at a time. Small inputs run in the event loop for a few milliseconds, which
costs less than a thread. Work that takes longer starts again in a thread. Large bodies: see ``large_bodies.py``.
"""

import asyncio
import ctypes
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from weft.errors import RequestError

Result = TypeVar("Result")

Middle = TypeVar("Middle")

NUM_THREADS = 2

SMALL = 1 << 12
"""Characters up to which an input is small."""

_SMALL_RESULT = 4 * SMALL
"""The same for what a template makes of a small one: tools and markup are part of it."""

_INLINE_S = 0.03
"""How long the event loop may work on a small one, by the clock."""

LARGE = 1 << 18
"""Characters from which on an input is large."""

_POLL_S = 0.01


class TemplateTimeout(BaseException):
    """Raised inside a template that runs too long; it is no ``Exception``, which templates and libraries catch."""


class RenderPool:
    """Threads for text work.

    Args:
        timeout_s: processor time that ``run_limited`` grants. Not time by the clock: on a busy machine a short template
            may have to wait for its turn.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._large = asyncio.Semaphore(NUM_THREADS - 1)
        self._has_timer = threading.current_thread() is threading.main_thread()  # only there signals interrupt
        if self._has_timer:
            signal.signal(signal.SIGALRM, _interrupted)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="render")

    async def run(self, work: Callable[..., Result], *args: Any, size: int = 0) -> Result:
        """Run ``work`` in a thread. ``size``: characters that it is about."""
        loop = asyncio.get_running_loop()
        if size < LARGE:
            return await loop.run_in_executor(self._threads, work, *args)
        async with self._large:
            return await loop.run_in_executor(self._threads, work, *args)

    async def run_limited(
        self,
        work: Callable[[], Middle],
        then: Callable[[Middle], Result],
        *,
        size: int = 0,
        size_of: Callable[[Middle], int] = lambda middle: 0,
    ) -> Result:
        """Run Python code that may not end by itself, and with its result ``then``, which does.

        Args:
            work, then: see above.
            size: characters that ``work`` is about.
            size_of: gives those that ``then`` is about.

        Raises:
            RequestError: ``work`` took longer than the limit.
        """
        if size < SMALL and self._has_timer:
            try:
                middle = _in_time(work)
            except TemplateTimeout:
                pass
            else:
                size = size_of(middle)
                return then(middle) if size < _SMALL_RESULT else await self.run(then, middle, size=size)
        limited = _Limited(work)
        alarm = _Alarm(limited, self._timeout_s)
        try:
            return await self.run(lambda: then(limited()), size=size)
        except TemplateTimeout as error:
            raise _too_slow(self._timeout_s) from error
        finally:
            alarm.cancel()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _interrupted(signal_number: int, frame: FrameType | None) -> None:
    """Only within ``_interruptible``: elsewhere the alarm comes too late."""
    while frame is not None and frame.f_code is not _interruptible.__code__:
        frame = frame.f_back
    if frame is not None:
        raise TemplateTimeout


def _interruptible(work: Callable[[], Result]) -> Result:
    return work()


def _in_time(work: Callable[[], Result]) -> Result:
    """Run ``work`` here. Raises TemplateTimeout after ``_INLINE_S``, and again where ``work`` lives on: some callbacks
    of the interpreter drop every exception."""
    signal.setitimer(signal.ITIMER_REAL, _INLINE_S, _INLINE_S)
    try:
        return _interruptible(work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def render_in_worker(work: Callable[[], Result], timeout_s: float) -> Result:
    """Run ``work`` in the main thread of a worker. Raises RequestError after ``timeout_s`` of processor time."""
    signal.signal(signal.SIGVTALRM, _interrupted)
    signal.setitimer(signal.ITIMER_VIRTUAL, timeout_s, _INLINE_S)
    try:
        return _interruptible(work)
    except TemplateTimeout as error:
        raise _too_slow(timeout_s) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _too_slow(timeout_s: float) -> RequestError:
    return RequestError(f"the chat template took longer than {timeout_s:g} s; shorten the conversation", "messages")


class _Limited:
    """A call that another thread can end by raising ``TemplateTimeout`` inside it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._began = 0.0

    def __call__(self) -> Any:
        with self._lock:
            self._began = time.thread_time()
            self._thread_id = threading.get_ident()
        try:
            try:
                return self._work()
            finally:
                self._end()
        finally:  # the interruption may have come within the other one
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._thread_id = None

    @property
    def processor_s(self) -> float:
        """Seconds of processor time used so far; 0.0 before the call has begun and after its end."""
        with self._lock:
            if self._thread_id is None:
                return 0.0
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread_id)) - self._began

    def interrupt(self) -> None:
        with self._lock:
            if self._thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(TemplateTimeout)
                )


class _Alarm:
    """Interrupt a call whose time is used up, repeatedly if necessary. It polls as rarely as possible."""

    def __init__(self, limited: _Limited, timeout_s: float) -> None:
        self._limited = limited
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(timeout_s, self._check)

    def _check(self) -> None:
        left = self._timeout_s - self._limited.processor_s
        if left <= 0:
            self._limited.interrupt()
            left = self._timeout_s
        self._handle = self._loop.call_later(max(left, _POLL_S), self._check)

    def cancel(self) -> None:
        self._handle.cancel()
