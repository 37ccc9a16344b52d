"""The hour of figures behind the page: rates, percentiles, what is forgotten."""

from __future__ import annotations

import random

import pytest

from weft.engine.wire import EngineStats
from weft.server.history import HOUR_S, RECENT_S, History, LatencyHistogram


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> History:
    return History(clock)


def stats(num_steps: int, prefill: int, decode: int, running: int = 1) -> EngineStats:
    return EngineStats(num_steps=num_steps, num_running=running, num_prefill_tokens=prefill, num_decode_tokens=decode)


def test_percentiles_are_exact_to_four_percent() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(-4, 1.5) for _ in range(5000)]
    histogram = LatencyHistogram()
    for value in values:
        histogram.observe(value)
    found = histogram.percentiles()
    assert found is not None
    for percent, value in zip((50, 90, 99), found, strict=True):
        assert value == pytest.approx(sorted(values)[int(5000 * percent / 100) - 1], rel=0.04)
    assert LatencyHistogram().percentiles() is None


def test_rates_are_differences_of_the_engines_counters(clock: Clock, history: History) -> None:
    history.engine_reported(stats(1, 100, 0))
    history.engine_reported(stats(5, 100, 40, running=3))
    clock.now += 1
    history.engine_reported(stats(6, 100, 50))
    clock.now += 1
    history.engine_reported(stats(2, 7, 9))  # another engine: counters begin again
    clock.now += 1
    points = history.view("recent", [history.report("recent")])["points"]
    assert [(p["start"], p["prefill"], p["decode"], p["running"]) for p in points] == [
        (1000, 100, 40, 3), (1001, 0, 10, 1), (1002, 7, 9, 1),
    ]  # fmt: skip


def test_what_the_engine_did_before_is_not_what_it_does_now(clock: Clock, history: History) -> None:
    """A process that takes the place of another one would show all of it as done within a second."""
    history.join()
    history.engine_reported(EngineStats(num_steps=900, num_prefill_tokens=50_000))
    clock.now += 1
    history.engine_reported(EngineStats(num_steps=901, num_prefill_tokens=50_007))
    clock.now += 1
    points = history.view("recent", [history.report("recent")])["points"]
    assert sum(point["prefill"] for point in points) == 7


def test_every_figure_of_an_interval_has_its_name(clock: Clock, history: History) -> None:
    """Every process knows the figures of the engine. Calls are the sum over all processes."""
    another = History(clock)
    for reporting in (history, another):
        reporting.engine_reported(EngineStats(num_steps=1, num_running=5, num_waiting=7, num_prefill_tokens=11))
        reporting.engine_reported(EngineStats(num_steps=2, num_running=3, num_waiting=6, num_prefill_tokens=11))
        for status in (200, 429):
            reporting.responded(status)
        reporting.first_token(0.5)
        reporting.next_tokens(0.02, 3)
    another.first_token(0.5)
    clock.now += 10
    for name, length, span, rate in (("recent", 1, RECENT_S, 11.0), ("hour", 10, HOUR_S, 1.1)):
        view = history.view(name, [each.report(name) for each in (history, another)])
        first, inter = ([pytest.approx(seconds, rel=0.04)] * 3 for seconds in (0.5, 0.02))
        calls = {"responses": {"ok": 2, "overloaded": 2}, "first_token": first, "inter_token": inter}
        point = {"start": 1000, "prefill": rate, "decode": 0.0, "accepted_length": None, "running": 5, "waiting": 7}
        assert view == calls | {
            "began": 1000.0, "interval_s": length, "span_s": span, "points": [point | calls], "num_first_tokens": 3,
            "num_inter_tokens": 6,
        }  # fmt: skip


def test_accepted_drafts_over_time(clock: Clock, history: History) -> None:
    history.engine_reported(stats(1, 5, 0))
    clock.now += 1
    history.engine_reported(EngineStats(num_steps=4, spec_decode_num_drafts=3, spec_decode_num_accepted_tokens=4))
    clock.now += 1
    history.engine_reported(EngineStats(num_steps=5, spec_decode_num_drafts=5, spec_decode_num_accepted_tokens=5))
    clock.now += 1
    points = history.view("recent", [history.report("recent")])["points"]
    assert [p["accepted_length"] for p in points] == [None, 2.333, 1.5]


def test_an_hour_is_kept_and_silence_costs_nothing(clock: Clock, history: History) -> None:
    for _ in range(2 * HOUR_S):
        clock.now += 1
        history.first_token(0.25)
        history.next_tokens(0.01, 1)
        history.responded(200)
    hour, recent = history.view("hour", [history.report("hour")]), history.view("recent", [history.report("recent")])
    assert abs(hour["num_first_tokens"] - HOUR_S) <= 20 and len(hour["points"]) <= HOUR_S // hour["interval_s"] + 1
    assert abs(recent["num_first_tokens"] - RECENT_S) <= 1
    assert hour["first_token"] == [pytest.approx(0.25, rel=0.04)] * 3
    clock.now += 10 * HOUR_S
    assert history.view("hour", [history.report("hour")])["points"] == []
    history.next_tokens(0.02, 4)
    clock.now += 10
    (point,) = history.view("hour", [history.report("hour")])["points"]
    assert point["inter_token"] == [pytest.approx(0.02, rel=0.04)] * 3 and point["first_token"] is None
    assert history.view("hour", [history.report("hour")])["num_inter_tokens"] == 4


def test_responses_by_kind(clock: Clock, history: History) -> None:
    for status in (200, 200, 400, 404, 429, 500, 503):
        history.responded(status)
    history.broke()
    clock.now += 1
    assert history.view("recent", [history.report("recent")])["responses"] == {
        "ok": 2,
        "refused": 2,
        "overloaded": 1,
        "failed": 2,
        "broken": 1,
    }
