"""Who is admitted next when more is asked for than the engine can take at once."""

from __future__ import annotations

import itertools
import random
import time
from array import array

import pytest

from tests.whole import unless_long
from weft.messages import RowSampling
from weft.processes.collector import collector_off
from weft.request import Request, RequestSpec
from weft.scheduler import fair_order
from weft.scheduler.fair_order import FairOrder
from weft.scheduler.queue import WaitingQueue


class Callers:
    """A queue whose requests are computed at once when they are admitted."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.queue = WaitingQueue("fcfs", self.order)
        self.numbers = itertools.count()

    def send(self, caller: str, max_tokens: int) -> int:
        number = next(self.numbers)
        self.order.begin(caller)
        self.queue.push(Request(str(number), array("I", [1]), RowSampling(), max_tokens, number, caller=caller))
        return number

    def serve(self, num_tokens: int | None = None) -> int:
        """Admit one request, which generates ``num_tokens`` tokens, or ``max_tokens`` if None."""
        request = next(iter(self.queue))
        self.queue.remove(request)
        self.order.admit(request.caller, 1)
        self.order.charge(request.caller, request.max_tokens if num_tokens is None else num_tokens)
        self.order.end(request.caller)
        return int(request.request_id)


def order_of(calls: list[tuple[str, int]], num_running: int = 8) -> list[int]:
    """The order in which calls (caller, max_tokens) are served, ``num_running`` of them at once and at once."""
    callers = Callers()
    served = []
    for number, (caller, max_tokens) in enumerate(calls):
        callers.send(caller, max_tokens)
        if number < num_running:
            served.append(callers.serve())
    return served + [callers.serve() for _ in range(len(callers.queue))]


def test_one_caller_is_served_in_order_of_arrival() -> None:
    rng = random.Random(0)
    calls = [("a", rng.randint(1, 2000)) for _ in range(50)]
    assert order_of(calls) == list(range(50))
    assert order_of([(str(i), 700) for i in range(50)]) == list(range(50))


def test_a_short_call_does_not_wait_for_three_hundred_long_ones() -> None:
    long = [(f"connection {i}", 4000) for i in range(300)]
    served = order_of([*long, ("mine", 16)])
    assert served.index(300) == 8  # right after those that run


def test_a_key_with_many_calls_leaves_another_its_share() -> None:
    served = order_of([("greedy", 100)] * 100 + [("modest", 100)] * 3)
    assert max(served.index(number) for number in (100, 101, 102)) < 8 + 2 * 3


def test_a_long_call_is_not_passed_for_ever() -> None:
    callers = Callers()
    long = callers.send("long", 4000)
    passed = 0
    while callers.send(f"short {passed}", 16) and callers.serve() != long:
        passed += 1
    assert passed < 2 * fair_order.MAX_EXPECTED / 16 + 1


def test_what_is_remembered_of_callers_is_bounded() -> None:
    callers = Callers()
    for number in range(20_000):
        callers.send(str(number), 1)
        callers.serve()
    assert len(callers.order._used) <= fair_order._MIN_REMEMBERED
    assert not callers.order._num_open and not callers.queue._lanes and len(callers.queue._heap) < 100


def test_callers_who_are_ahead_are_remembered() -> None:
    """Else a caller with many calls would count as a new one as soon as there are enough others."""
    order = FairOrder()
    for caller in "abc":
        order.begin(caller)
        order.wait(caller)
    order.admit("a", 900)
    order.end("a")
    order._forget_at = 2
    for caller in "da":
        order.begin(caller)
        order.wait(caller)
    assert order.key("a", 10) == 910 and order.key("d", 10) == 310


def test_who_comes_now_is_placed_behind_all_that_was_served() -> None:
    order = FairOrder()
    for caller in "ab":
        order.begin(caller)
        order.wait(caller)
    order.admit("a", 100)
    order.charge("a", 60)
    order.admit("b", 1)
    order.begin("new")
    order.wait("new")
    assert order.key("a", 10) == 170
    assert order.key("new", 10) == pytest.approx(90.5), "half of what two callers have got"
    order.admit("a", 0)
    order.begin("newer")
    order.wait("newer")
    assert order.key("newer", 10) == 170


def test_who_waits_longer_than_expected_is_placed_by_what_was_charged_meanwhile() -> None:
    """The first entry of a caller in the heap is older than what its other requests have cost since."""
    callers = Callers()
    a, b = callers.send("a", 10), callers.send("b", 300)
    callers.order.begin("a")
    callers.order.charge("a", 400)
    assert [callers.serve(), callers.serve()] == [b, a]


def test_of_a_caller_whose_first_request_has_to_wait_the_next_is_tried() -> None:
    callers = Callers()
    for number in range(6):
        callers.send("ab"[number % 2], 10)
    seen = []
    for request in callers.queue:
        seen.append(int(request.request_id))
        if request.request_id in "13":
            callers.queue.remove(request)
            callers.order.admit(request.caller, 100)
    assert sorted(seen) == list(range(6)) and seen[:2] == [0, 1]
    assert [int(request.request_id) for request in callers.queue] == [0, 2, 4, 5]


@pytest.mark.parametrize("num_callers", unless_long([50_000], [1, 50_000]))
def test_fifty_thousand_that_wait_cost_little(num_callers: int) -> None:
    callers = Callers()
    for number in range(50_000):
        callers.send(str(number % num_callers), 100)
    with collector_off():  # a visit to the objects of all other tests takes longer
        began = time.process_time()
        for number in range(256):
            callers.serve()
            callers.send(f"new {number}", 5)
    assert time.process_time() - began < 0.1


def test_a_spec_and_its_request_have_the_same_fields() -> None:
    request = Request(
        "r", array("I", [1, 2]), RowSampling(), 5, arrival=3, cache_salt="s", caller="c", arrival_time=1.5
    )
    again = Request.of(request.spec)
    assert again.spec == request.spec and isinstance(again.spec, RequestSpec) and again.times.arrival == 1.5
    assert again is not request and again != request and again.output_token_ids is not request.output_token_ids
