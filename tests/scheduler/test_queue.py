"""The waiting queue: the order, and what many requests cost that wait behind the first."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tests.scheduler.test_scheduler import Rig, make_request
from weft.request import Request
from weft.scheduler.queue import SchedulePolicy, WaitingQueue, sort_key

MANY = 10_000


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_the_order_is_that_of_the_policy_and_of_arrival(policy: SchedulePolicy) -> None:
    """Equal requests are in the order of their pushes. Requests may return to the middle of the queue."""
    rng, queue, waiting = random.Random(policy), WaitingQueue(policy), list[Request]()
    for number in range(400):
        request = make_request(str(number), [1], 1, arrival=rng.randrange(20), priority=rng.randrange(3))
        queue.push(request)
        waiting.append(request)
        waiting.sort(key=lambda each: sort_key(policy, each))
        if rng.random() < 0.4:
            waiting.remove(gone := rng.choice(waiting))
            queue.remove(gone)
        assert list(queue) == waiting and len(queue) == len(waiting)


def test_what_has_come_out_may_be_removed() -> None:
    queue = WaitingQueue("fcfs")
    for number in range(10):
        queue.push(make_request(str(number), [1], 1, arrival=number))
    seen = []
    for request in queue:
        seen.append(request.request_id)
        if request.arrival % 3:
            queue.remove(request)
    assert seen == [str(number) for number in range(10)]
    assert [request.request_id for request in queue] == ["0", "3", "6", "9"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_many_that_wait_cost_nothing_when_one_is_admitted(policy: str) -> None:
    """A list of them all would be made for every step and every request."""
    rig = Rig(pages=50, seqs=4, budget=64, policy=policy, caches=True)
    for number in range(MANY):
        rig.scheduler.add(make_request(str(number), [number % 7, 5], 2, arrival=number))
    most = 0
    for _ in range(6):
        tracemalloc.start()
        step = rig.scheduler.schedule()
        most = max(most, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert step is not None
        rig.scheduler.update(rig.runner.run(step))
    assert MANY - len(rig.scheduler.requests) >= 8
    assert most < 8 * MANY, f"{most} bytes are no less than a list of those that wait"
