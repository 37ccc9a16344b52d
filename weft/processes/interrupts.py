"""Interrupts (Ctrl-C) are delivered between steps, since an interrupt inside a step would leave half-written state."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held(*, second_too: bool) -> Iterator[Callable[[], None]]:
    """Hold back SIGINT in the body. Python's handler runs after the body, and whenever the body calls the yielded
    function.

    Args:
        second_too: hold back a second SIGINT as well; otherwise its handler runs at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None  # handlers run in the main thread; a disposition that is no function raises nothing
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
