"""The waiting queue: which request is scheduled next."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Literal

from weft.request import Request

SchedulePolicy = Literal["fcfs", "priority", "lpm"]


def sort_key(policy: SchedulePolicy, request: Request) -> tuple[int, int]:
    """Requests with a smaller key go first: by priority and then arrival (``priority``), else by arrival.

    ``lpm`` reorders the head of the queue when it is scheduled, by what is cached then; here it is as ``fcfs``.
    """
    return (request.priority if policy == "priority" else 0, request.arrival)


class WaitingQueue:
    """Waiting requests in policy order. A preempted request keeps its arrival, so it returns ahead of newer ones.

    They are kept from last to first: there may be very many, and the first ones go without a look at the others.
    """

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy: SchedulePolicy = policy
        self._requests: list[Request] = []

    def _key(self, request: Request) -> tuple[int, int]:
        priority, arrival = sort_key(self.policy, request)
        return -priority, -arrival

    def push(self, request: Request) -> None:
        bisect.insort_left(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        place = bisect.bisect_left(self._requests, self._key(request), key=self._key)
        while self._requests[place] is not request:
            place += 1
        del self._requests[place]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """From first to last; those that have come out may be removed meanwhile."""
        return reversed(self._requests)
