"""Places in the waiting queue when more is asked for than the engine can take at once."""

from __future__ import annotations

import random
from array import array

import pytest

from weft.engine import fair_order
from weft.engine.fair_order import FairOrder
from weft.messages import RowSampling
from weft.request import Request, RequestSpec
from weft.scheduler.queue import WaitingQueue


def order_of(calls: list[tuple[str, int]], num_running: int = 8) -> list[int]:
    """The order in which calls (caller, max_tokens) are served, ``num_running`` of them at once and at once."""
    fair, queue = FairOrder(), WaitingQueue("fcfs")
    served: list[int] = []

    def serve() -> None:
        request = next(iter(queue))
        queue.remove(request)
        fair.served(request.arrival)
        served.append(int(request.request_id))

    for number, (caller, max_tokens) in enumerate(calls):
        place = fair.place(caller, max_tokens)
        queue.push(Request(str(number), array("I", [1]), RowSampling(), max_tokens, arrival=place, caller=caller))
        if number < num_running:
            serve()
    while len(queue):
        serve()
    return served


def test_one_caller_is_served_in_order_of_arrival() -> None:
    rng = random.Random(0)
    calls = [("a", rng.randint(1, 2000)) for _ in range(50)]
    assert order_of(calls) == list(range(50))
    assert order_of([(str(i), 700) for i in range(50)]) == list(range(50))


def test_a_short_call_does_not_wait_for_three_hundred_long_ones() -> None:
    long = [(f"connection {i}", 4000) for i in range(300)]
    served = order_of([*long, ("mine", 16)])
    assert served.index(300) == 8  # right behind those that run


def test_a_key_with_many_calls_leaves_another_its_share() -> None:
    served = order_of([("greedy", 100)] * 100 + [("modest", 100)] * 3)
    assert max(served.index(number) for number in (100, 101, 102)) < 8 + 2 * 3


def test_a_long_call_is_not_passed_for_ever() -> None:
    fair = FairOrder()
    long = fair.place("long", 4000)
    passed = 0
    while (place := fair.place(f"short {passed}", 16)) < long:
        fair.served(place)
        passed += 1
    assert passed < fair_order.MAX_COST / 16 + 1


def test_what_is_remembered_of_callers_is_bounded() -> None:
    fair = FairOrder()
    for number in range(20_000):
        fair.served(fair.place(str(number), 1))
    assert len(fair._last) <= fair_order._MAX_CALLERS


def test_callers_whose_place_is_ahead_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a caller with many calls would get the places of a new one as soon as there are enough others."""
    monkeypatch.setattr(fair_order, "_MAX_CALLERS", 2)
    fair = FairOrder()
    assert [fair.place(caller, 100) for caller in ("a", "b", "c", "a")] == [100, 100, 100, 200]


def test_who_comes_now_is_placed_behind_all_that_was_served() -> None:
    """Also where one that came first got its first token last."""
    fair = FairOrder()
    fair.served(100)
    fair.served(50)
    assert fair.place("new", 10) == 110


def test_a_spec_and_its_request_have_the_same_fields() -> None:
    request = Request(
        "r", array("I", [1, 2]), RowSampling(), 5, arrival=3, cache_salt="s", caller="c", arrival_time=1.5
    )
    again = Request.of(request.spec)
    assert again.spec == request.spec and isinstance(again.spec, RequestSpec) and again.times.arrival == 1.5
    assert again is not request and again != request and again.output_token_ids is not request.output_token_ids
