"""Ending requests whose step failed.

What ended outside a step is kept until the loop returns it. What went wrong is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.errors import EngineDeadError
from weft.messages import ModelOutput, SchedulerOutput
from weft.request import Request
from weft.scheduler.scheduler import Scheduler


class Failures:
    """Requests with finish reason ``"error"`` that the next step returns.

    Attributes:
        fatal: why no step can run any more.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: list[Request] = []
        self.fatal: EngineDeadError | None = None

    def end_step(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """A step raised: its requests end."""
        self._end_step(scheduler_output)
        if isinstance(error, EngineDeadError):
            self.fatal = error

    def _end_step(self, scheduler_output: SchedulerOutput) -> None:
        rows = [scheduled.row for scheduled in scheduler_output.requests]
        if self._scheduler.encoder is not None:
            self._scheduler.encoder.forget(scheduler_output.encodings)
        self._requests += self._scheduler.update(ModelOutput(scheduler_output.step, [], [], failed_rows=rows))

    def end_all(self, in_flight: Iterable[SchedulerOutput], held_back: Iterable[Request]) -> None:
        """The executor is dead: steps in flight have no results, and no request can go on."""
        for scheduler_output in in_flight:
            self._end_step(scheduler_output)
        for request in self._scheduler.requests:
            self._scheduler.finish(request.request_id, "error")
            self._requests.append(request)
        for request in held_back:
            self.end(request)

    def end(self, request: Request, why: str | None = None) -> None:
        """``request`` could not be given to the scheduler."""
        request.end("error", why)
        self._requests.append(request)

    def take(self) -> list[Request]:
        """The requests that ended since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def __bool__(self) -> bool:
        return bool(self._requests)
