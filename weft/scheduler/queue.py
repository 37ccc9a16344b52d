"""The waiting queue: which request is admitted next."""

import heapq
import itertools
from bisect import bisect_left, insort_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from weft.request import Request
from weft.scheduler.fair_order import FairOrder

SchedulePolicy = Literal["fcfs", "priority", "lpm"]


def sort_key(policy: SchedulePolicy, request: Request) -> tuple[int, int, int]:
    """The sort key of a request that runs. Smaller keys were admitted first, or have a better priority.

    Requests of one caller that were not admitted yet are ordered by their arrival.
    """
    return (request.priority if policy == "priority" else 0, request.admission or 0, request.arrival)


@dataclass(slots=True, eq=False)
class _Lane:
    """Waiting requests of one caller, from last to first; there may be very many.

    Attributes:
        num_passed: leading requests that the current iteration has passed over.
        turn: number of the lane's valid entry in the heap; 0: it has none.
    """

    requests: list[Request] = field(default_factory=list)
    num_passed: int = 0
    turn: int = 0

    @property
    def current(self) -> Request:
        return self.requests[-1 - self.num_passed]

    @property
    def is_exhausted(self) -> bool:
        return self.num_passed == len(self.requests)


_Key = tuple[int, int, float, int]


class WaitingQueue:
    """Waiting requests in policy order: by priority under the policy ``priority``, then in fair order of their callers.

    A preempted request returns ahead of those that were never admitted. Under ``lpm`` the scheduler reorders the head
    of the queue by what is cached.

    Each caller has a lane. A heap has one valid entry per lane, whose key may be too small: counters of callers grow
    while their requests wait. An entry with an outdated key is corrected when it is popped.
    """

    def __init__(self, policy: SchedulePolicy, order: FairOrder | None = None) -> None:
        self.policy: SchedulePolicy = policy
        self._order = order or FairOrder()
        self._lanes: dict[str, _Lane] = {}
        self._preempted = _Lane()
        self._heap: list[tuple[_Key, int, _Lane]] = []
        self._turns = itertools.count(1)
        self._touched: dict[_Lane, None] = {}  # their entries were removed by the last iteration
        self._size = 0

    def _key_in_lane(self, request: Request) -> tuple[int, ...]:
        return tuple(-part for part in sort_key(self.policy, request))

    def _key(self, request: Request) -> _Key:
        priority = request.priority if self.policy == "priority" else 0
        if request.admission is not None:
            return priority, 0, request.admission, 0
        place = self._order.key(request.caller, request.num_prompt_tokens + request.max_tokens)
        return priority, 1, place, request.arrival

    def _enter(self, lane: _Lane) -> None:
        """Make an entry for the lane's current request the valid one."""
        lane.turn = next(self._turns)
        heapq.heappush(self._heap, (self._key(lane.current), lane.turn, lane))
        if len(self._heap) > 64 + 4 * len(self._lanes):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].turn]
            heapq.heapify(self._heap)

    def _restore(self) -> None:
        """Undo what the last iteration did to lanes."""
        touched, self._touched = self._touched, {}
        for lane in touched:
            lane.num_passed = 0
            if lane.requests:
                self._enter(lane)

    def push(self, request: Request) -> None:
        self._restore()
        lane = self._preempted
        if request.admission is None:
            lane = self._lanes.setdefault(request.caller, _Lane())
            if not lane.requests:
                self._order.wait(request.caller)
        insort_left(lane.requests, request, key=self._key_in_lane)
        self._size += 1
        if lane.current is request:
            self._enter(lane)

    def remove(self, request: Request) -> None:
        lane = self._preempted if request.admission is not None else self._lanes[request.caller]
        requests = lane.requests
        place = bisect_left(requests, self._key_in_lane(request), key=self._key_in_lane)
        while requests[place] is not request:
            place += 1
        from_first = len(requests) - 1 - place
        del requests[place]
        self._size -= 1
        if not requests:
            lane.num_passed = lane.turn = 0
            if lane is not self._preempted:
                del self._lanes[request.caller]
        elif from_first < lane.num_passed:
            lane.num_passed -= 1
        elif from_first == lane.num_passed and not lane.is_exhausted:
            self._enter(lane)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yield requests from first to last. The caller may remove yielded requests during the iteration, and must not
        add any."""
        self._restore()
        while self._heap:
            key, turn, lane = heapq.heappop(self._heap)
            if turn != lane.turn:
                continue
            request = lane.current
            actual = self._key(request)
            if actual > key:
                heapq.heappush(self._heap, (actual, turn, lane))
                continue
            self._touched[lane] = None
            yield request
            if not lane.is_exhausted and lane.current is request:
                lane.num_passed += 1
                if not lane.is_exhausted:
                    self._enter(lane)
