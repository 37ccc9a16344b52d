"""Chat templates and tokenization, off the event loop.

Job: run both in threads, and stop a template that runs too long. Owns: the threads. Does not know: HTTP, sampling.

Templates are programs of the checkpoint, run in jinja2's immutable sandbox; the conversation decides how long they
take. Tokenizers release the interpreter lock, so threads are enough.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from weft.errors import RequestError

Result = TypeVar("Result")

NUM_THREADS = 2


class TemplateTimeout(Exception):
    """Raised inside a template that runs too long."""


class RenderPool:
    """Threads for text work. ``timeout_s``: limit of what runs under ``run_limited``."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="render")

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def run_limited(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run Python code that may not end by itself.

        Raises:
            RequestError: it took longer than the limit.
        """
        limited = _Limited(work, args)
        alarm = asyncio.get_running_loop().call_later(self._timeout_s, limited.interrupt)
        try:
            return await self.run(limited)
        except (TemplateTimeout, RequestError) as error:
            if isinstance(error, TemplateTimeout) or isinstance(error.__cause__, TemplateTimeout):
                raise RequestError(
                    f"the chat template took longer than {self._timeout_s:g} s; shorten the conversation", "messages"
                ) from error
            raise
        finally:
            alarm.cancel()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Limited:
    """A call that another thread can end by raising ``TemplateTimeout`` inside it."""

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._work = work
        self._args = args
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._is_late = False

    def __call__(self) -> Any:
        with self._lock:
            if self._is_late:
                raise TemplateTimeout  # it waited for a thread for so long
            self._thread_id = threading.get_ident()
        try:
            return self._work(*self._args)
        finally:
            with self._lock:
                self._thread_id = None

    def interrupt(self) -> None:
        with self._lock:
            self._is_late = True
            if self._thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(TemplateTimeout)
                )
