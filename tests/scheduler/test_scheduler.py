"""The scheduler against a model made of hashes: outputs must be what each request alone would give."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest

from tests import specs
from tests.fake_runner import VOCAB, FakeRunner, oracle
from tests.late_device import Owned
from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.cache.state_plan import CheckpointPolicy
from weft.messages import ModelOutput, RowSampling, SchedulerOutput
from weft.request import Request
from weft.scheduler.scheduler import Scheduler

PAGE = 4


def make_spec(hybrid: bool = True) -> CacheSpec:
    return specs.make_spec(page_size=PAGE, linear=int(hybrid), head_dim=8)


class Rig:
    """Scheduler and fake runner; ``depth`` steps may be in flight before results are taken in.

    The device is late: a launched step runs when its results are asked for, or when this or a later step is launched.
    ``late`` is the probability that a launch runs nothing. Pages and slots that are free by then hold rubbish.
    """

    late = 0.7

    def __init__(
        self,
        *,
        pages: int,
        seqs: int,
        budget: int,
        policy: str = "fcfs",
        hybrid: bool = True,
        slots: int | None = None,
        caches: bool = False,
        checkpoint_policy: CheckpointPolicy = "exact",
    ) -> None:
        slots = slots if slots is not None else (seqs + 1 if hybrid else 1)
        self.manager = Manager(
            make_spec(hybrid),
            num_pages=pages,
            num_slots=slots,
            enable_prefix_caching=caches,
            checkpoint_policy=checkpoint_policy,
        )
        self.scheduler = Scheduler(self.manager, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy)
        self.runner = FakeRunner(pages, PAGE, slots, hybrid)
        self.in_flight: deque[SchedulerOutput | ModelOutput] = deque()
        self._moments = random.Random(pages)
        self._owned = Owned()
        self.order_of_first_tokens: list[str] = []
        self.max_step_tokens = 0

    def step(self, depth: int = 0) -> None:
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            assert scheduler_output.num_tokens <= self.scheduler.max_num_batched_tokens, "a step exceeds the budget"
            self.max_step_tokens = max(self.max_step_tokens, scheduler_output.num_tokens)
            self.in_flight.append(scheduler_output)
            if self._moments.random() >= self.late:
                self.in_flight = deque(map(self._run, self.in_flight))
        self.scheduler.check()
        while self.in_flight and (len(self.in_flight) > depth or scheduler_output is None):
            for request in self.scheduler.update(self._run(self.in_flight.popleft())):
                if len(request.output_token_ids) == 1:
                    self.order_of_first_tokens.append(request.request_id)
            self.scheduler.check()

    def _run(self, step: SchedulerOutput | ModelOutput) -> ModelOutput:
        """The results of a launched step, which runs now if it has not."""
        if isinstance(step, ModelOutput):
            return step
        self._owned.check(step, self.manager)
        self.runner.spoil(self.manager.pages._free, self.manager.slots._free)
        return self.runner.run(step)

    def run(self, depth: int = 0, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step(depth)
        raise AssertionError("the scheduler does not come to an end")


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int,
    arrival: int = 0,
    stop: frozenset[int] = frozenset(),
    priority: int = 0,
) -> Request:
    return Request(
        name, array("I", prompt), RowSampling(), max_tokens, arrival=arrival, eos_token_ids=stop, priority=priority
    )


def random_requests(rng: random.Random, count: int, longest: int, most: int, stop: frozenset[int]) -> list[Request]:
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        requests.append(make_request(f"r{i}", prompt, rng.randint(1, most), i, stop, rng.randint(0, 2)))
    return requests


def expect(request: Request) -> None:
    want = oracle(request.prompt_token_ids.tolist(), request.max_tokens, request.eos_token_ids)
    assert request.output_token_ids == want, request.request_id
    assert request.finish_reason == ("stop" if want[-1] in request.eos_token_ids else "length")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_outputs_equal_one_at_a_time(depth: int, hybrid: bool, policy: str) -> None:
    rng = random.Random(f"{depth}{hybrid}{policy}")
    stop = frozenset(rng.sample(range(VOCAB), 40))
    rig = Rig(pages=200, seqs=8, budget=24, policy=policy, hybrid=hybrid)
    requests = random_requests(rng, 40, 60, 30, stop)
    for request in requests:
        rig.scheduler.add(request)
    rig.run(depth)
    for request in requests:
        expect(request)
    assert rig.max_step_tokens <= 24
    assert rig.manager.pages.num_free == 199


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_pool_far_too_small_preempts_and_still_answers_right(depth: int, policy: str) -> None:
    rng = random.Random(depth)
    rig = Rig(pages=18, seqs=6, budget=16, policy=policy)
    requests = random_requests(rng, 30, 30, 34, frozenset())
    for request in requests:
        rig.scheduler.add(request)
    rig.run(depth)
    for request in requests:
        expect(request)
    assert rig.scheduler.stats().num_preemptions > 0, "the test should have forced preemptions"
    assert rig.manager.pages.num_free == 17


@pytest.mark.parametrize("seed", range(30))
def test_fuzz_of_arrivals_and_aborts(seed: int) -> None:
    """Random arrivals, aborts at any moment, steps in flight; nothing leaks, survivors are right."""
    rng = random.Random(seed)
    hybrid = rng.random() < 0.7
    rig = Rig(
        pages=rng.randint(12, 40),
        seqs=rng.randint(1, 6),
        budget=rng.randint(6, 40),
        policy=rng.choice(["fcfs", "priority"]),
        hybrid=hybrid,
    )
    stop = frozenset(rng.sample(range(VOCAB), 30))
    todo = random_requests(rng, 25, 20, 20, stop)
    started: list[Request] = []
    aborted: set[str] = set()
    while todo or rig.scheduler.has_work:
        while todo and rng.random() < 0.4:
            request = todo.pop()
            rig.scheduler.add(request)
            started.append(request)
        if started and rng.random() < 0.15:
            victim = rng.choice(started)
            if rig.scheduler.finish(victim.request_id, "abort"):
                aborted.add(victim.request_id)
            rig.scheduler.check()
        rig.step(depth=rng.randint(0, 2))
    for request in started:
        if request.request_id in aborted:
            assert request.finish_reason == "abort"
            want = oracle(request.prompt_token_ids.tolist(), request.max_tokens, request.eos_token_ids)
            assert request.output_token_ids == want[: len(request.output_token_ids)]
        else:
            expect(request)
    rig.scheduler.check()
    assert rig.manager.pages.num_free == rig.manager.pages.capacity
    assert rig.manager.slots.num_free == rig.manager.slots.capacity


def test_long_prompt_does_not_stop_decodes() -> None:
    """Chunked prefill: a running request gets a token in every step while a long prompt is worked off."""
    rig = Rig(pages=100, seqs=4, budget=8)
    short = make_request("short", [1, 2, 3], 20)
    long = make_request("long", list(range(100)), 2, arrival=1)
    rig.scheduler.add(short)
    rig.step()
    rig.scheduler.add(long)
    for expected in range(2, 10):
        rig.step()
        assert len(short.output_token_ids) == expected
    assert 0 < long.num_computed_tokens < 100


def test_a_prefill_of_higher_priority_leaves_room_for_decodes() -> None:
    """The chunk is planned first, and the decodes behind it count against the budget all the same."""
    rig = Rig(pages=100, seqs=4, budget=8, policy="priority")
    decoding = [make_request(f"r{i}", [i + 1], 30, i, priority=5) for i in range(3)]
    for request in decoding:
        rig.scheduler.add(request)
    rig.step()
    first = make_request("first", list(range(40)), 2, 9, priority=0)
    rig.scheduler.add(first)
    for expected in (5, 10, 15):
        rig.step()
        assert rig.max_step_tokens == 8 and first.num_computed_tokens == expected
    assert all(len(request.output_token_ids) == 4 for request in decoding)


def test_decodes_come_first_the_longest_ahead_and_prefills_in_their_order() -> None:
    rig = Rig(pages=100, seqs=6, budget=40)
    for i, length in enumerate([3, 9, 6, 9]):
        rig.scheduler.add(make_request(f"r{i}", [i + 1] * length, 5, i))
    rig.step()
    for i in (4, 5):
        rig.scheduler.add(make_request(f"r{i}", [i] * (i - 2), 5, i))
    step = rig.scheduler.schedule()
    assert step is not None
    assert [(r.start, r.num_tokens) for r in step.requests] == [(9, 1), (9, 1), (6, 1), (3, 1), (0, 2), (0, 3)]


def test_priority_goes_first_and_fcfs_does_not() -> None:
    def order(policy: str) -> list[str]:
        rig = Rig(pages=100, seqs=1, budget=50, policy=policy)
        for i, (priority, arrival) in enumerate([(5, 0), (1, 2), (3, 1), (1, 1)]):
            rig.scheduler.add(make_request(f"r{i}", [i + 1], 2, arrival, priority=priority))
        rig.run()
        return rig.order_of_first_tokens

    assert order("priority") == ["r3", "r1", "r2", "r0"]
    assert order("fcfs") == ["r0", "r2", "r3", "r1"]


def test_the_last_in_policy_order_makes_room_whenever_it_came() -> None:
    rig = Rig(pages=17, seqs=2, budget=32, policy="priority")
    low, high = make_request("low", [1] * 20, 30, 0, priority=5), make_request("high", [2] * 10, 25, 1, priority=0)
    rig.scheduler.add(low)
    rig.step()
    rig.scheduler.add(high)
    rig.run()
    assert low.num_preemptions and not high.num_preemptions
    expect(low)
    expect(high)


def test_few_slots_limit_concurrency_without_a_deadlock() -> None:
    rig = Rig(pages=100, seqs=4, budget=40, slots=3)
    requests = random_requests(random.Random(3), 10, 10, 10, frozenset())
    for request in requests:
        rig.scheduler.add(request)
    rig.run()
    for request in requests:
        expect(request)


def test_stop_by_length_is_never_launched_past() -> None:
    rig = Rig(pages=50, seqs=2, budget=16)
    request = make_request("r", [1, 2, 3], 5)
    rig.scheduler.add(request)
    rig.run(depth=2)
    assert rig.runner.num_tokens_run == 3 + 4, "the last token is sampled but never fed"
    expect(request)


def test_token_of_a_request_that_stopped_meanwhile_is_dropped() -> None:
    prompt = [5, 6, 7]
    first = oracle(prompt, 1)[0]
    rig = Rig(pages=50, seqs=2, budget=16)
    request = make_request("r", prompt, 10, stop=frozenset({first}))
    rig.scheduler.add(request)
    rig.run(depth=1)
    assert request.output_token_ids == [first] and request.finish_reason == "stop"
    assert rig.manager.pages.num_free == 49


def test_failed_row_fails_alone() -> None:
    rig = Rig(pages=50, seqs=4, budget=32)
    good, bad = make_request("good", [1, 2], 4), make_request("bad", [3, 4], 4, arrival=1)
    rig.scheduler.add(good)
    rig.scheduler.add(bad)
    scheduler_output = rig.scheduler.schedule()
    assert scheduler_output is not None
    output = rig.runner.run(scheduler_output)
    failed = next(r.row for r in rig.scheduler._rows.running if r.request is bad)
    rig.scheduler.update(ModelOutput(output.step, output.rows, output.token_ids, failed_rows=[failed]))
    rig.run()
    assert bad.finish_reason == "error" and bad.output_token_ids == []
    expect(good)
