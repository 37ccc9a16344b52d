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
    """Waiting requests in policy order. A preempted request keeps its arrival, so it returns ahead of newer ones."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy: SchedulePolicy = policy
        self._entries: list[tuple[tuple[int, int], Request]] = []

    def push(self, request: Request) -> None:
        bisect.insort(self._entries, (sort_key(self.policy, request), request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        self._entries = [entry for entry in self._entries if entry[1] is not request]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)
