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
        return await self.run(_Limited(self._timeout_s), work, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Limited:
    """Calls a function; a timer raises ``TemplateTimeout`` inside it when time is up."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running = False

    def __call__(self, work: Callable[..., Result], *args: Any) -> Result:
        timer = threading.Timer(self._timeout_s, self._interrupt, (threading.get_ident(),))
        timer.daemon = True
        timer.start()
        try:
            self._running = True
            try:
                return work(*args)
            finally:
                with self._lock:
                    self._running = False
                timer.cancel()
        except TemplateTimeout as error:
            raise self._refusal() from error
        except RequestError as error:
            if isinstance(error.__cause__, TemplateTimeout):
                raise self._refusal() from error
            raise

    def _refusal(self) -> RequestError:
        return RequestError(
            f"the chat template took longer than {self._timeout_s:g} s; shorten the conversation", "messages"
        )

    def _interrupt(self, thread_id: int) -> None:
        with self._lock:
            if self._running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(TemplateTimeout))
