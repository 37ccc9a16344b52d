"""The scheduler with the prefix cache, against a model made of hashes: cached or not, outputs are the same."""

from __future__ import annotations

import random

import pytest

from tests.fake_runner import VOCAB, FakeRunner, oracle
from tests.scheduler.test_scheduler import PAGE, Rig, expect, make_request, make_spec
from tests.whole import unless_long
from weft.cache.manager import Manager
from weft.messages import ModelOutput, RowSampling
from weft.request import Request
from weft.scheduler.running import Running, RunningRequests
from weft.scheduler.scheduler import Scheduler


def make_rig(
    *, pages: int = 400, seqs: int = 8, budget: int = 64, slots: int = 40, hybrid: bool = True, **settings: str
) -> Rig:
    policy = settings.pop("policy", "fcfs")
    rig = Rig(pages=pages, seqs=seqs, budget=budget, hybrid=hybrid)
    slots = slots if hybrid else 1
    rig.manager = Manager(
        make_spec(hybrid),
        num_pages=pages,
        num_slots=slots,
        enable_prefix_caching=True,
        **settings,  # type: ignore[arg-type]
    )
    rig.scheduler = Scheduler(
        rig.manager,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        policy=policy,  # type: ignore[arg-type]
    )
    rig.runner = FakeRunner(pages, PAGE, slots, hybrid)
    return rig


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def run(rig: Rig, *requests: Request, depth: int = 0) -> None:
    for request in requests:
        rig.scheduler.add(request)
    rig.run(depth)
    for request in requests:
        expect(request)


def assert_idle(rig: Rig) -> None:
    pages, slots = rig.manager.pages, rig.manager.slots
    assert pages.num_free + pages.num_evictable == pages.capacity
    assert slots.num_free + rig.manager.evictor.num_evictable_slots == slots.capacity


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_conversation_goes_on_after_every_kind_of_end(depth: int) -> None:
    """Stop token, length, abort: whatever ended the last turn, the next one is right and reuses what was fed."""
    rig = make_rig()
    history, rng, num_fed = prompt(50), random.Random(depth), 0
    for turn in range(12):
        stop = frozenset(rng.sample(range(VOCAB), 200)) if turn % 3 == 0 else frozenset()
        request = make_request(f"turn {turn}", list(history), 9, turn, stop)
        rig.scheduler.add(request)
        if turn % 3 == 1:
            for _ in range(5):
                rig.step(depth)
            rig.scheduler.finish(request.request_id, "abort")
        rig.run(depth)
        if request.finish_reason != "abort":
            expect(request)
        if depth < 2:  # further ahead, a step may have been fed a token that nobody learned: that state is dropped
            assert request.num_cached_tokens is not None and request.num_cached_tokens >= num_fed
        num_fed = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
        history = request.known_token_ids.tolist() + prompt(7, turn)
    assert_idle(rig)


def test_nobody_waits_for_a_prefill_under_another_salt() -> None:
    rig = make_rig(budget=512)
    requests = [make_request(f"r{i}", prompt(210), 4, i) for i in range(2)]
    requests[1].cache_salt = "other"
    run(rig, *requests)
    assert [r.num_cached_tokens for r in requests] == [0, 0] and rig.max_step_tokens == 420


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_identical_prompts_that_arrive_together_are_computed_once(hybrid: bool, depth: int) -> None:
    rig = make_rig(hybrid=hybrid)
    requests = [make_request(f"r{i}", prompt(210), 4, i) for i in range(5)]
    run(rig, *requests, depth=depth)
    assert [r.num_cached_tokens for r in requests] == [0, 209, 209, 209, 209]


@pytest.mark.parametrize("hybrid", [True, False])
def test_fan_out_computes_the_shared_prefix_once(hybrid: bool) -> None:
    rig = make_rig(hybrid=hybrid, slots=80)
    requests = [make_request(f"r{i}", [*prompt(150), i, *prompt(60, i)], 3, i) for i in range(12)]
    run(rig, *requests)
    assert [r.num_cached_tokens for r in requests] == [0] + [150] * 11


def test_an_aborted_prefill_is_not_awaited() -> None:
    rig = make_rig()
    first, second = (make_request(f"r{i}", prompt(210), 4, i) for i in range(2))
    rig.scheduler.add(first)
    rig.scheduler.add(second)
    rig.step()
    assert second.num_cached_tokens is None
    rig.scheduler.finish("r0", "abort")
    rig.run()
    expect(second)
    assert second.num_cached_tokens == 64  # what the aborted one had fed


def test_what_an_aborted_prefill_has_in_flight_is_awaited() -> None:
    rig = make_rig()
    first, second = (make_request(f"r{i}", prompt(210), 4, i) for i in range(2))
    rig.scheduler.add(first)
    rig.scheduler.add(second)
    rig.step(depth=1)
    rig.step(depth=1)
    rig.scheduler.finish("r0", "abort")
    rig.run(depth=1)
    expect(second)
    assert second.num_cached_tokens == 128


def test_states_ordered_before_an_abort_are_kept() -> None:
    """Aborted while the step that stores the border is in flight: the border is filed, what lay ahead is not."""
    rig = make_rig()
    request = make_request("r", prompt(210), 4)
    request.checkpoint_positions = [37, 150]
    rig.scheduler.add(request)
    scheduler_output = rig.scheduler.schedule()
    assert scheduler_output is not None and [p for p, _ in scheduler_output.requests[0].checkpoints] == [37]
    output = rig.runner.run(scheduler_output)
    rig.scheduler.finish("r", "abort")
    rig.scheduler.check()
    assert rig.manager.match(prompt(210)).num_tokens == 0
    rig.scheduler.update(output)
    rig.scheduler.check()
    assert rig.manager.match([*prompt(210)[:40], 1]).num_tokens == 37
    assert rig.manager.match(prompt(210)).num_tokens == 64
    run(rig, make_request("again", prompt(210), 4))
    assert_idle(rig)


def test_salts_share_nothing_even_when_they_arrive_together() -> None:
    rig = make_rig()
    requests = [make_request(f"r{i}", prompt(210), 4, i) for i in range(6)]
    for request, salt in zip(requests, ["a", "b", None] * 2, strict=True):
        request.cache_salt = salt
    run(rig, *requests)
    assert [r.num_cached_tokens for r in requests] == [0, 0, 0, 209, 209, 209]


@pytest.mark.parametrize("depth", [0, 1])
def test_nan_forgets_all_that_the_request_had_filed(depth: int) -> None:
    """NaN shows when a token is sampled; the chunks before it were filed by then, and may be where it came from."""
    rig = make_rig()
    run(rig, make_request("sound", [*prompt(30), *prompt(30, 1)], 3))
    request = make_request("bad", [*prompt(30), *prompt(180, 2)], 3, 1)
    request.checkpoint_positions = [100]
    rig.scheduler.add(request)
    while request.finish_reason is None:
        scheduler_output = rig.scheduler.schedule()
        if scheduler_output is not None:
            output = rig.runner.run(scheduler_output)
            nan = [r.row for r in scheduler_output.requests if r.samples]
            rig.in_flight.append(ModelOutput(output.step, output.rows, output.token_ids, failed_rows=nan))
        if len(rig.in_flight) > depth or scheduler_output is None:
            rig.scheduler.update(rig.in_flight.popleft())
        rig.scheduler.check()
    rig.run()
    match = rig.manager.match(request.prompt_token_ids)
    assert (match.num_kv_tokens, match.num_tokens) == (30, 0), "only the KV that another request needs is left"
    assert rig.manager.match([*prompt(30), *prompt(30, 1), 5]).num_tokens > 30
    run(rig, make_request("again", request.prompt_token_ids.tolist(), 3, 2))
    assert_idle(rig)


def test_prompt_logprobs_compute_everything_and_await_no_prefill() -> None:
    rig = make_rig(budget=512)
    requests = [make_request(f"r{i}", prompt(210), 4, i) for i in range(2)]
    requests[1].sampling = RowSampling(prompt_logprobs=1)
    run(rig, *requests)
    assert [r.num_cached_tokens for r in requests] == [0, 0]
    assert rig.max_step_tokens == 420


def test_a_resumed_request_reuses_what_is_left_of_it() -> None:
    """Two requests outgrow the pool: the later one is preempted and comes back to the KV and state that it left."""
    rig = make_rig(pages=42, seqs=2, slots=20)
    old, new = make_request("old", prompt(60), 40, 0), make_request("new", prompt(60, 1), 40, 1)
    run(rig, old, new)
    assert new.num_preemptions and not old.num_preemptions
    assert rig.manager.stats().num_hit_tokens >= 59
    assert_idle(rig)


def test_a_resumed_request_stores_the_state_at_the_end_of_its_prompt() -> None:
    """Where nothing is left of it, it computes prompt and output anew, as one long prefill."""
    rig = make_rig()
    request = make_request("r", prompt(60), 20)
    rig.scheduler.add(request)
    while len(request.output_token_ids) < 8:
        rig.step()
    rig.scheduler._preempt(rig.scheduler._rows.running[0])
    assert rig.manager.reset()
    run(rig)
    expect(request)
    again = make_request("again", [*prompt(60), 5], 2, 1)
    run(rig, again)
    assert again.num_cached_tokens == 59


def test_the_next_turn_finds_what_a_step_in_flight_leaves() -> None:
    """A request has ended, and a step beyond its end is in flight: the next turn waits for that one."""
    text = oracle(prompt(50), 8)
    rig = make_rig()
    first = make_request("first", prompt(50), 20, stop=frozenset({text[-1]}))
    rig.scheduler.add(first)
    while not first.is_finished:
        rig.step(depth=1)
    second = make_request("second", [*prompt(50), *text, 5], 3, 1)
    run(rig, second, depth=1)
    expect(first)
    assert second.num_cached_tokens == 58


def test_few_shared_tokens_are_not_waited_for() -> None:
    """To compute them twice takes less time than to run one after the other."""
    rig = make_rig(budget=256)
    requests = [make_request(f"r{i}", [*prompt(40), *prompt(30, 1 + i)], 3, i) for i in range(2)]
    run(rig, *requests)
    assert rig.max_step_tokens == 140


def test_prompt_logprobs_compute_everything() -> None:
    rig = make_rig()
    run(rig, make_request("first", prompt(100), 3))
    request = make_request("second", prompt(100), 3)
    request.sampling = type(request.sampling)(prompt_logprobs=1)
    run(rig, request)
    assert request.num_cached_tokens == 0


def test_longest_match_goes_first() -> None:
    rig = make_rig(seqs=1, policy="lpm")
    run(rig, make_request("seen", prompt(100), 3))
    waiting = [make_request("new", prompt(90, 5), 2, 1), make_request("known", prompt(100), 2, 2)]
    run(rig, *waiting)
    assert rig.order_of_first_tokens[-2:] == ["known", "new"]


def test_a_stream_of_better_matches_keeps_nobody_waiting_for_ever() -> None:
    """``lpm``: whoever came first goes first every so often."""
    rig = make_rig(seqs=1, policy="lpm")
    run(rig, make_request("seen", prompt(100), 3))
    oldest = make_request("oldest", prompt(90, 5), 2, 1)
    rig.scheduler.add(oldest)
    for i in range(200):
        if oldest.is_finished:
            break
        rig.scheduler.add(make_request(f"known {i}", prompt(100), 2, 2 + i))
        rig.step()
    assert oldest.is_finished
    rig.run()


def test_failed_steps_leave_nothing_behind() -> None:
    rig = make_rig()
    request = make_request("bad", prompt(100), 3)
    rig.scheduler.add(request)
    scheduler_output = rig.scheduler.schedule()
    assert scheduler_output is not None
    rig.scheduler.update(ModelOutput(scheduler_output.step, [], [], failed_rows=[0]))
    rig.scheduler.check()
    assert request.finish_reason == "error"
    assert rig.manager.match(prompt(100)).num_kv_tokens == 0
    assert_idle(rig)


@pytest.mark.parametrize("seed", unless_long(range(16), range(40)))
def test_random_branching_workloads(seed: int) -> None:
    """Arrivals that branch from each other, aborts, preemptions, late results, tiny pools: every output is right."""
    rng = random.Random(seed)
    hybrid = rng.random() < 0.75
    seqs = rng.randint(1, 6)
    rig = make_rig(
        pages=rng.choice([22, 40, 80]),
        seqs=seqs,
        budget=rng.randint(seqs, 40),
        slots=rng.randint(2, 14),
        hybrid=hybrid,
        policy=rng.choice(["fcfs", "priority", "lpm"]),
        checkpoint_policy=rng.choice(["exact", "exact", "aligned", "finish_only"]),
        eviction=rng.choice(["lru", "flops"]),
    )
    stop = frozenset(rng.sample(range(VOCAB), 30))
    corpus: list[list[int]] = [[1]]
    requests: list[Request] = []
    aborted: set[str] = set()
    while len(requests) < 40 or rig.scheduler.has_work:
        if len(requests) < 40 and rng.random() < 0.3:
            base = rng.choice(corpus)
            tokens = base[: rng.randint(0, len(base))] + prompt(rng.choice([0, 1, 5, 20]), rng.random())
            tokens = (tokens or [2])[:70]
            request = make_request(
                f"r{len(requests)}", tokens, rng.randint(1, 14), len(requests), stop, rng.randint(0, 1)
            )
            request.checkpoint_positions = sorted({rng.randint(1, len(tokens)) for _ in range(rng.randint(0, 3))})
            request.cache_salt = rng.choice([None, None, None, "salt"])
            requests.append(request)
            rig.scheduler.add(request)
        if requests and rng.random() < 0.1:
            victim = rng.choice(requests)
            if rig.scheduler.finish(victim.request_id, "abort"):
                aborted.add(victim.request_id)
        rig.step(depth=rng.randint(0, 2))
        corpus = [r.known_token_ids.tolist() for r in requests[-10:]] or corpus
    for request in requests:
        if request.request_id not in aborted:
            expect(request)
    assert_idle(rig)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_decoding_request_keeps_one_snapshot(depth: int) -> None:
    """``aligned``: each multiple of 64 replaces the one before; of 200 decodes nothing is left over but the last."""
    rig = make_rig(checkpoint_policy="aligned", slots=6)
    request = make_request("long", prompt(10), 200)
    rig.scheduler.add(request)
    while rig.scheduler.has_work:
        rig.step(depth)
        assert rig.manager.slots.capacity - rig.manager.slots.num_free <= 3, "working slot, snapshot, the new one"
    expect(request)
    assert rig.manager.slots.capacity - rig.manager.slots.num_free == 1
    tokens = request.known_token_ids.tolist()
    assert rig.manager.match(tokens).num_tokens == 192
    assert_idle(rig)


def test_what_a_step_in_flight_uses_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's device is late, and it looks: memory given back at once, with steps in flight, is noticed."""

    def at_once(self: RunningRequests, running: Running) -> bool:
        if running in self.leaving:
            self.leaving.remove(running)
            self._manager.release(running.lease, running.request.known_token_ids, keep=not running.failed)
            self._free_row(running)
        return True

    monkeypatch.setattr(RunningRequests, "release_if_idle", at_once)
    with pytest.raises(AssertionError):
        for seed in range(5):
            test_random_branching_workloads(seed)
