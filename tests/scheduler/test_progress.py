"""Requests always come to an end: pools hardly larger than one context, prompts that the cache knows already."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.test_prefix_reuse import assert_idle, make_rig, prompt, run
from tests.scheduler.test_scheduler import PAGE, Rig, expect, make_request
from tests.whole import unless_long
from weft.messages import RowSampling
from weft.request import Request

POOL = 16
"""Pages that can be handed out."""
CONTEXT = POOL * PAGE


def small_rig(policy: str = "exact", budget: int = 16, pages: int = POOL, hybrid: bool = True) -> Rig:
    return make_rig(pages=pages + 1, seqs=4, budget=budget, slots=8, checkpoint_policy=policy, hybrid=hybrid)


def full(name: str, tokens: list[int], arrival: int = 0, context: int = CONTEXT) -> Request:
    """A request that fills the context."""
    return make_request(name, tokens, context + 1 - len(tokens), arrival)


def with_all_logprobs(request: Request) -> Request:
    request.sampling = RowSampling(prompt_logprobs=1)
    return request


@pytest.fixture(params=["exact", "aligned", "finish_only"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("shared", range(1, 12))
def test_a_prompt_that_leaves_another_inside_a_page(shared: int, policy: str) -> None:
    rig = small_rig(policy)
    run(rig, make_request("first", [*prompt(shared), 5, 6], 1))
    run(rig, full("second", prompt(10), 1))
    assert_idle(rig)


@pytest.mark.parametrize("length", [9, 10, 31, 40])
def test_the_same_prompt_twice(length: int, policy: str) -> None:
    rig = small_rig(policy)
    run(rig, full("first", prompt(length)))
    run(rig, full("second", prompt(length), 1))
    assert_idle(rig)


def test_borders_inside_a_prompt_as_long_as_the_pool(policy: str) -> None:
    rig = small_rig(policy)
    for i in range(3):
        request = full(f"r{i}", prompt(CONTEXT - 1), i)
        request.checkpoint_positions = [7, 25]
        run(rig, request)
    assert_idle(rig)


def test_two_turns_of_a_conversation(policy: str) -> None:
    rig = small_rig(policy, budget=8)
    first = make_request("turn 1", prompt(21), 9)
    first.checkpoint_positions = [18]
    run(rig, first)
    second = full("turn 2", [*first.prompt_token_ids[:18], *first.output_token_ids, *prompt(5, 1)], 1)
    second.checkpoint_positions = [29]
    run(rig, second)
    assert_idle(rig)


@pytest.mark.parametrize("border", [None, 33])
def test_prompt_logprobs_of_a_cached_prompt(policy: str, border: int | None) -> None:
    rig = small_rig(policy)
    for i in range(3):
        request = full(f"r{i}", prompt(38), i)
        request.checkpoint_positions = [border] if border else []
        if i:
            request.sampling = RowSampling(prompt_logprobs=1)
        run(rig, request)
    assert_idle(rig)


@pytest.mark.parametrize("seed", unless_long(range(20), range(60)))
def test_random_branches_in_a_pool_of_one_context(seed: int) -> None:
    """A few requests at a time, each up to the whole pool, that branch off prompts and outputs; ``Rig`` checks after
    every step that nothing is preempted without progress."""
    rng = random.Random(seed)
    pages = rng.choice([8, 12, POOL])
    rig = small_rig(rng.choice(["exact", "aligned", "finish_only"]), rng.randint(4, 24), pages, rng.random() < 0.8)
    corpus, done = [prompt(40, seed)], []
    for i in range(14):
        base = rng.choice(corpus)
        tokens = (base[: rng.randint(0, len(base))] + prompt(rng.choice([0, 1, 3, 9]), i + 1000 * seed))[
            : pages * PAGE - 1
        ]
        room = pages * PAGE + 1 - max(1, len(tokens))
        request = make_request(f"r{i}", tokens or [3], rng.choice([1, room, rng.randint(1, room)]), i)
        request.checkpoint_positions = sorted(
            {rng.randint(1, len(request.prompt_token_ids)) for _ in range(rng.randint(0, 3))}
        )
        if rng.random() < 0.2:
            request.sampling = RowSampling(prompt_logprobs=1)
        rig.scheduler.add(request)
        done.append(request)
        for _ in range(rng.randint(0, 30)):
            rig.step(depth=rng.randint(0, 2))
        corpus = [r.known_token_ids.tolist() for r in done]
    rig.run()
    for request in done:
        expect(request)
    assert_idle(rig)


def test_nobody_is_admitted_to_the_page_that_a_running_request_needs_next() -> None:
    rig = small_rig(budget=64)
    first, second = make_request("first", prompt(3 * PAGE + 1), 12), make_request("second", prompt(12 * PAGE, 1), 1, 1)
    rig.scheduler.add(first)
    rig.step()
    rig.scheduler.add(second)
    rig.step()
    assert rig.manager.pages.num_free + rig.manager.pages.num_evictable == 12, "as many as the second needs"
    assert second.num_computed_tokens == 0, "the last one is the first request's, which needs it soon"
    rig.run()
    expect(first)
    expect(second)
    assert not first.num_preemptions and not second.num_preemptions


def test_a_request_locks_only_what_it_reads() -> None:
    """Tokens that the tree has already, computed again: the tree's pages may be evicted while the request runs."""
    rig = small_rig()
    run(rig, make_request("first", prompt(20), 1))
    request = make_request("second", prompt(20), 30, 1)
    request.sampling = RowSampling(prompt_logprobs=1)
    rig.scheduler.add(request)
    for _ in range(4):
        rig.step()
    pages = rig.manager.pages
    assert len(request.output_token_ids) == 3
    assert pages.capacity - pages.num_free - pages.num_evictable == -(-22 // PAGE), "only its own pages are held"


def test_going_round_in_circles_raises_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """Preempted by hand, and nothing kept: the same 16 tokens computed again are no progress, one more chunk is."""
    rig = Rig(pages=POOL + 1, seqs=1, budget=16)
    rig.scheduler.add(make_request("r", prompt(60), 2))
    for chunks in (1, 2, 3):
        for _ in range(chunks):
            rig.step()
        rig.scheduler._preempt(rig.scheduler._rows.running[0])
        rig.scheduler.check()
    for _ in range(3):
        rig.step()
    assert not caplog.records
    rig.scheduler._preempt(rig.scheduler._rows.running[0])
    assert rig.scheduler.stats().num_stalls == 1 and "preempted again at 48 of 60 tokens" in caplog.text
    with pytest.raises(AssertionError, match="no token was computed in between"):
        rig.scheduler.check()
