"""When an interrupt (Ctrl-C) comes through: between steps, not inside one, where it would leave half-written states."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held(*, second_too: bool) -> Iterator[Callable[[], None]]:
    """Python's handler of SIGINT does not run in the body, but when the body calls what it is given, and after it.

    Args:
        second_too: False: a second SIGINT does not wait for that.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None  # handlers run in the main thread; what is no function raises nothing
        return
    run: Callable[..., Any] = handler
    came: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        if came and not second_too:
            run(number, frame)
        came.append((number, frame))

    def deliver() -> None:
        if came:
            first = came[0]
            came.clear()
            run(*first)

    signal.signal(signal.SIGINT, note)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, run)
        deliver()
