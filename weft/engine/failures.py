"""Ending requests whose step failed.

Requests that end outside a step are kept until the loop returns them. The cause of a failure is not known here.
"""

from collections.abc import Iterable

from weft.errors import EngineDeadError
from weft.messages import ModelOutput, SchedulerOutput
from weft.request import Request
from weft.scheduler.scheduler import Scheduler


class Failures:
    """Requests with finish reason ``"error"`` that the next step returns.

    Attributes:
        fatal: the reason why no step can run any more.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: list[Request] = []
        self.fatal: EngineDeadError | None = None

    def end_step(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """End the requests of a step that raised."""
        self._end_step(scheduler_output)
        if isinstance(error, EngineDeadError):
            self.fatal = error

    def _end_step(self, scheduler_output: SchedulerOutput) -> None:
        rows = [scheduled.row for scheduled in scheduler_output.requests]
        if self._scheduler.encoder is not None:
            self._scheduler.encoder.discard(scheduler_output.encodings)
        if self._scheduler.restores is not None:
            self._scheduler.restores.broke(scheduler_output)
        self._requests += self._scheduler.update(ModelOutput(scheduler_output.step, [], [], failed_rows=rows))

    def end_all(self, in_flight: Iterable[SchedulerOutput], held_back: Iterable[Request]) -> None:
        """End all requests after the executor died. Steps in flight have no results."""
        for scheduler_output in in_flight:
            self._end_step(scheduler_output)
        for request in self._scheduler.requests:
            self._scheduler.finish(request.request_id, "error")
            self._requests.append(request)
        for request in held_back:
            self.end(request)

    def end(self, request: Request, why: str | None = None) -> None:
        """End ``request``, which could not be added to the scheduler."""
        request.end("error", why)
        self._requests.append(request)

    def take(self) -> list[Request]:
        """Return the requests that ended since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def __bool__(self) -> bool:
        return bool(self._requests)
