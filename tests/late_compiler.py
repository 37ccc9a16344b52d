"""A compiler of grammars that is as late as a seed says, so that a seed gives the same steps on every machine.

An engine compiles grammars in a thread, and a constrained request joins the waiting queue in the step after that thread
was done: how soon depends on what else the machine does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from weft import LLM


class LateCompiler:
    """Stands before an engine's thread; ``run_some``, called before each step, decides what is compiled by then."""

    def __init__(self, llm: LLM, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        compiler = llm._core._grammars._compiler
        compiler._threads.shutdown()
        compiler._threads = self  # type: ignore[assignment]

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Add a call to the queue, like ``concurrent.futures.Executor.submit``."""
        future: Future[Any] = Future()
        self._waiting.append((future, call, arguments))
        return future

    def run_some(self) -> None:
        """Compile none, some or all of what waits."""
        while self._waiting and self._rng.random() < 0.6:
            future, call, arguments = self._waiting.popleft()
            try:
                future.set_result(call(*arguments))
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, **options: Any) -> None:
        """Nothing runs by itself."""
