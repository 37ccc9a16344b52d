"""Requests that end because something broke.

Job: end the requests of a step that raised, and keep what ended outside a step until the loop returns it.
Owns: the ended requests that nobody was told of yet. Does not know: what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.messages import ModelOutput, SchedulerOutput
from weft.request import Request
from weft.scheduler.scheduler import Scheduler


class Failures:
    """Requests with finish reason ``"error"`` that the next step returns."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: list[Request] = []

    @contextmanager
    def ending(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Whatever the body raises ends the requests of this step, and is passed on."""
        try:
            yield
        except BaseException:
            rows = [scheduled.row for scheduled in scheduler_output.requests]
            self._requests += self._scheduler.update(ModelOutput(scheduler_output.step, [], [], failed_rows=rows))
            raise

    def end(self, request: Request) -> None:
        """``request`` could not be given to the scheduler."""
        request.end("error")
        self._requests.append(request)

    def take(self) -> list[Request]:
        """The requests that ended since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def __bool__(self) -> bool:
        return bool(self._requests)
