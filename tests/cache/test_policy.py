"""The order of eviction, by recency, FLOPs saved and the reuse of similar states, and the choice of the weight."""

from __future__ import annotations

import random

import pytest

from tests.cache.fake_memory import FakeMemory
from tests.cache.test_manager import PROMPT, begin, make, run
from tests.cache.test_manager_fuzz import make_spec
from weft.cache import state_plan
from weft.cache.dump import dump_tree
from weft.cache.manager import EndedRequest, Manager
from weft.cache.nodes import as_tokens
from weft.cache.policy import FlopAware, ReuseOdds
from weft.cache.state_plan import prefill_positions
from weft.cache.tuning import AlphaTuner, replay_request


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def survivors(manager: Manager, prompts: list[list[int]]) -> list[bool]:
    return [manager.match([*p, 1]).num_tokens == len(p) for p in prompts]


def test_lru_drops_the_oldest_state() -> None:
    manager, memory = make(slots=5, checkpoint_policy="finish_only", eviction="lru")
    prompts = [tokens(length, length) for length in (150, 20, 30)]
    for prompt in prompts:
        run(manager, memory, prompt)
    manager.evictor.take_slot()
    manager.evictor.take_slot()
    assert survivors(manager, prompts) == [False, True, True]


def test_lru_keeps_what_was_used_since() -> None:
    manager, memory = make(slots=5, checkpoint_policy="finish_only", eviction="lru")
    prompts = [tokens(length, length) for length in (150, 20, 30)]
    for prompt in prompts:
        run(manager, memory, prompt)
    used = begin(manager, [*prompts[0], 1])
    manager.release(used.lease, used.tokens)
    evict_states(manager, 1)
    assert survivors(manager, prompts) == [True, False, True]


def test_flop_aware_keeps_the_state_that_saves_most() -> None:
    manager, memory = make(slots=5, checkpoint_policy="finish_only", eviction=FlopAware(4.0))
    prompts = [tokens(length, length) for length in (150, 20, 30)]
    for prompt in prompts:
        run(manager, memory, prompt)
    manager.evictor.policy.observe_eviction(10)
    manager.evictor.take_slot()
    manager.evictor.take_slot()
    assert survivors(manager, prompts) == [True, False, True]


def test_value_is_marginal_to_the_nearest_state_above() -> None:
    """100 tokens above a state at 90 save 10; 40 tokens on their own save 40."""
    manager, memory = make(slots=6, checkpoint_policy="finish_only", eviction=FlopAware(4.0))
    long, short = tokens(100, 0), tokens(40, 1)
    run(manager, memory, long[:90])
    run(manager, memory, short)
    run(manager, memory, long)
    manager.evictor.policy.observe_eviction(10)
    for _ in range(3):
        manager.evictor.take_slot()
    assert survivors(manager, [long[:90], long, short]) == [True, False, True]


def evict_states(manager: Manager, count: int) -> list[int]:
    """Slots: all free ones, and those of ``count`` states that make room."""
    return [slot for _ in range(manager.slots.num_free + count) if (slot := manager.evictor.take_slot()) is not None]


def test_a_state_that_comes_above_lowers_the_value_of_those_below() -> None:
    """100 tokens save more than 40, until 90 of them have a state of their own; the heaps have been built before."""
    manager, memory = make(slots=6, checkpoint_policy="finish_only", eviction=FlopAware(4.0))
    long, short = tokens(100, 0), tokens(40, 1)
    for prompt in (tokens(9, 2), long, short):
        run(manager, memory, prompt)
    manager.evictor.policy.observe_eviction(10)
    for slot in evict_states(manager, 1):
        manager.slots.release(slot)
    run(manager, memory, long[:90])
    evict_states(manager, 1)
    assert survivors(manager, [long[:90], long, short]) == [True, False, True]


def test_kv_that_lost_its_state_goes_first() -> None:
    """Nothing can be computed from it any more, however late it was used."""
    manager, memory = make(slots=4, checkpoint_policy="finish_only", eviction=FlopAware(4.0))
    kept, lost = tokens(150, 0), tokens(140, 1)
    for prompt in (kept, lost):
        run(manager, memory, prompt)
    manager.tree.clock += 10
    manager.match(lost).prefix.node.last_used = manager.tree.clock  # type: ignore[union-attr]
    manager.evictor.policy.observe_eviction(10)
    evict_states(manager, 1)
    assert survivors(manager, [kept, lost]) == [True, False]
    assert manager.evictor.make_room(manager.pages.num_free + 2)
    assert [manager.match(prompt).num_kv_tokens for prompt in (kept, lost)] == [150, 112]


def test_kv_and_states_are_evicted_independently() -> None:
    manager, memory = make(slots=4, checkpoint_policy="finish_only", eviction="lru")
    run(manager, memory, PROMPT)
    while manager.tree.num_checkpoints:
        manager.evictor.take_slot()
    match = manager.match([*PROMPT, 1])
    assert (match.num_kv_tokens, match.num_tokens) == (210, 0)
    assert "lost states 210" in dump_tree(manager.tree)
    assert manager.evictor.make_room(manager.pages.capacity)
    assert manager.match(PROMPT).num_kv_tokens == 0 and manager.stats().num_evicted_pages == 14


def test_only_what_was_consumed_is_refreshed() -> None:
    manager, memory = make(checkpoint_policy="finish_only", eviction="lru")
    run(manager, memory, PROMPT[:100])
    run(manager, memory, PROMPT)
    before = {p: c.last_used for n in manager.tree.nodes() for p, c in n.checkpoints.items()}
    run(manager, memory, [*PROMPT, 5, 6])
    after = {p: c.last_used for n in manager.tree.nodes() for p, c in n.checkpoints.items()}
    assert after[100] == before[100] and after[210] > before[210]


def test_odds_follow_what_became_of_others() -> None:
    odds = ReuseOdds()
    assert odds("end", 0, 0) == 1.0
    for _ in range(96):
        odds.add("end", 0, 0)
    assert odds("end", 0, 0) == 0.04 and odds("boundary", 0, 0) == 1.0
    for _ in range(48):
        odds.use("end", 0, 0)
    assert odds("end", 0, 0) == 0.52
    assert odds("end", 0, 1) == 4 / 52


def test_reuse_of_states_is_learned() -> None:
    """One of five ends of first answers is used. The next end of its conversation is of another kind."""
    manager, memory = make(checkpoint_policy="finish_only")
    prompts = [tokens(20, seed) for seed in range(5)]
    for prompt in prompts:
        run(manager, memory, prompt)
    odds = manager.evictor.odds
    assert odds("end", 0, 0) == 4 / 9 and odds("end", 0, 1) == odds("end", 1, 0) == 1.0
    run(manager, memory, [*prompts[0], 1, 2])
    assert odds("end", 0, 0) == 5 / 9 and odds("end", 0, 1) == odds("end", 1, 0) == 4 / 5


@pytest.mark.parametrize("hybrid", [True, False])
def test_ended_requests_are_told_with_their_prompts(hybrid: bool) -> None:
    """The weight is tuned on the tokens fed, the number of prompt tokens among them, and the boundaries."""
    manager, memory = make(hybrid)
    told: list[tuple[int, int, str | None]] = []
    manager.observer = lambda ended: told.append((len(ended.tokens), ended.num_prompt_tokens, ended.salt))
    run(manager, memory, PROMPT, output=[1, 2])
    running = begin(manager, PROMPT[:100])
    manager.release(running.lease, running.tokens)  # ended before its prompt was computed
    assert told == [(212, 210, None)]


def test_alpha_follows_the_load() -> None:
    """Long conversations among short one-off prompts: efficiency must gain weight, and save more than recency does."""

    def saved(tune: bool) -> tuple[float, int]:
        spec = make_spec(hybrid=True, page_size=16)
        policy = FlopAware(0.0)
        manager = Manager(spec, num_pages=400, num_slots=12, enable_prefix_caching=True, eviction=policy)
        if tune:
            manager.observer = AlphaTuner(manager)
        histories, reused = [tokens(200, c) for c in range(4)], 0
        for turn in range(60):
            for one_off in range(6):
                replay_request(manager, tokens(20, 1000 * turn + one_off), 20)
            conversation = histories[turn % 4]
            conversation += tokens(20, 7 * turn)
            reused += replay_request(manager, conversation[:], len(conversation))
        manager.check()
        return policy.alpha, reused

    (alpha, tuned), (_, fixed) = saved(True), saved(False)
    assert alpha > 0 and tuned > 1.15 * fixed


def test_the_weight_is_tried_on_caches_like_the_real_one() -> None:
    manager, memory = make(slots=3, checkpoint_policy="finish_only")
    tuner = AlphaTuner(manager)
    for seed in range(3):
        run(manager, memory, tokens(40, seed))
    ended = as_tokens(tokens(50, 9))
    tuner(EndedRequest(ended, 40, "a", [20]))
    for shadow, _ in tuner._shadows.values():
        pools = [(each.pages.num_pages, each.slots.num_slots, each.checkpoint_policy) for each in (shadow, manager)]
        assert pools[0] == pools[1]
        assert shadow.match([*ended, 1], "a").num_tokens == 50 and shadow.match([*ended, 1]).num_kv_tokens == 0


def test_order_of_checkpoints_and_their_limit() -> None:
    def positions(policy: str = "exact", **values: object) -> list[int]:
        given = {"reused": 0, "divergence": None, "boundaries": [], "num_prompt_tokens": 20_000, "alignment": 64}
        return prefill_positions(policy, **(given | values))  # type: ignore[arg-type]

    assert positions() == [8192, 12288, 16384, 19999]
    assert positions(num_prompt_tokens=210) == [209]
    assert positions(divergence=70, boundaries=[10, 300, 200]) == [70, 200, 300, 19999]
    assert positions(reused=250, boundaries=[10, 300, 200], num_prompt_tokens=400) == [300, 399]
    assert positions(reused=399, num_prompt_tokens=400) == []
    assert positions("aligned", divergence=70, num_prompt_tokens=210) == [64, 192]
    assert positions("aligned", num_prompt_tokens=64) == []
    assert positions("aligned", divergence=200, num_prompt_tokens=210, alignment=192) == [192]
    assert positions("finish_only", divergence=70) == []


def test_a_running_prefill_stores_no_more_for_others_than_its_limit() -> None:
    for boundaries, found in (([20], 100), ([20, 50, 80], 80)):  # and the prompt's end: the limit is four
        manager, _ = make()
        running = begin(manager, PROMPT, boundaries=boundaries)
        assert manager.states.shareable(manager.match([*PROMPT[:100], 7]), running.lease) == found


def test_most_prefills_share_too_little_by_one_look_at_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = make()
    running, match = begin(manager, PROMPT), manager.match([*PROMPT[:100], 7])
    for least, found in ((1, 100), (100, 100), (101, 0), (5000, 0)):
        assert manager.states.shareable(match, running.lease, least) == found
    assert manager.states.shareable(manager.match(PROMPT[:100]), running.lease, 99) == 99
    assert manager.states.shareable(manager.match(PROMPT[:100]), running.lease, 100) == 0  # one is left to compute
    monkeypatch.setattr(state_plan, "common_prefix", None)
    assert manager.states.shareable(match, running.lease, 101) == 0


def test_dump_shows_spans_leases_and_states() -> None:
    manager, memory = make()
    assert dump_tree(manager.tree) == "the cache is empty"
    run(manager, memory, PROMPT)
    lease = manager.lease(manager.match([*PROMPT[:100], 7]))
    assert lease is not None
    assert dump_tree(manager.tree).splitlines() == [
        "root",
        "  [0, 100) 7 pages, 1 leases, used 1 admissions ago",
        "    [100, 210) 8 pages, states 209 210, used 1 admissions ago",
    ]
    assert isinstance(memory, FakeMemory)
