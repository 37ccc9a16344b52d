"""The router: where requests go, and how much of one cache's hits several replicas keep."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from tests.specs import make_spec
from weft.bench.prefix_workloads import make_workload
from weft.cache.manager import Manager
from weft.cache.tuning import ReplayCounts, replay_request
from weft.engine.prefix_hashes import CHUNK, STEP, chunks_of_hashes, reusable_prefixes
from weft.engine.router import FULL_TOKENS, LOAD_TOKENS, RECENT_S, NoReplicaError, Router
from weft.offload.reports import UNMEASURED_PRICE, PrefixReports
from weft.offload.tier import HostTier


def prefix_hashes(token_ids: Any, salt: str | None = None) -> list[int]:
    """``hashes[n - 1]`` is that of the first ``n * STEP`` tokens."""
    return list(chain.from_iterable(chunks_of_hashes(token_ids, salt)))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_router(count: int = 2, max_num_seqs: int = 8) -> tuple[Router, Clock]:
    clock = Clock()
    router = Router(count, max_num_seqs, clock)
    for index in range(count):
        router.up(index)
    return router, clock


def prompt(seed: int, length: int = 500) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def make_manager(hybrid: bool) -> Manager:
    spec = make_spec(linear=1 if hybrid else 0)
    return Manager(spec, num_pages=12_000, num_slots=800 if hybrid else 1, enable_prefix_caching=True)


# -- hashes ------------------------------------------------------------------------------------------------------------


def test_a_prefix_has_one_hash() -> None:
    tokens = prompt(1)
    assert prefix_hashes(tokens)[:2] == prefix_hashes(tokens[:130]) and prefix_hashes(tokens[: STEP - 1]) == []
    assert prefix_hashes(tokens, "salt")[1] != prefix_hashes(tokens)[1]
    assert len({*prefix_hashes(tokens), *prefix_hashes(prompt(2))}) == 2 * (500 // STEP)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_tree_tells_what_a_prompt_can_start_from(hybrid: bool) -> None:
    """Up to the last whole step: of each end of a prompt, and of where prompts part, for recurrent states."""
    manager, shared = make_manager(hybrid), prompt(1, 300)
    for seed in (5, 6, 7):
        replay_request(manager, [*shared, *prompt(seed, 200)], 450, salt="s")
    told = set(reusable_prefixes(manager.tree, needs_state=hybrid))
    known = [n for n, value in enumerate(prefix_hashes([*shared, *prompt(6, 200)], "s"), 1) if value in told]
    assert max(known) == 500 // STEP and 300 // STEP in known and not told & set(prefix_hashes(prompt(9)))
    if not hybrid:
        assert known == list(range(1, 500 // STEP + 1))


@pytest.mark.parametrize("hybrid", [False, True])
def test_ids_of_images_count_as_other_tokens_do(hybrid: bool) -> None:
    """They are negative. A prompt and the tree agree on them, and another image is another prefix."""
    manager = make_manager(hybrid)
    cat, dog = ([*prompt(1, 70), *([-image] * 60), *prompt(2, 70)] for image in (2**40 + 3, 2**40 + 4))
    replay_request(manager, cat, len(cat) - 1)
    told = set(reusable_prefixes(manager.tree, needs_state=hybrid))
    last = 200 // STEP - 1
    assert prefix_hashes(cat)[last] in told and prefix_hashes(dog)[last] not in told
    assert prefix_hashes(cat)[0] == prefix_hashes(dog)[0] and not {*prefix_hashes(cat)[1:]} & {*prefix_hashes(dog)[1:]}


def test_what_was_used_last_is_reported_if_not_all_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(False)
    for seed in (5, 6):
        replay_request(manager, prompt(seed, 2 * STEP + 1), 2 * STEP)
    monkeypatch.setattr("weft.engine.prefix_hashes.MAX_REPORTED", 2)
    assert set(reusable_prefixes(manager.tree, needs_state=False)) == set(prefix_hashes(prompt(6, 2 * STEP + 1)))


def test_a_state_counts_up_to_the_last_whole_step_before_it_also_where_that_is_in_the_node_above() -> None:
    manager, shared = make_manager(True), prompt(1, 300)
    for seed in (5, 6):
        replay_request(manager, [*shared, *prompt(seed, 10)], 305)
    told = reusable_prefixes(manager.tree, needs_state=True)
    assert told == [prefix_hashes(shared)[300 // STEP - 1]], "one prefix, of three states"


def test_hashing_in_chunks_changes_no_hash() -> None:
    tokens = prompt(1, 3 * CHUNK + 100)
    chunks = list(chunks_of_hashes(tokens, "s"))
    assert [len(chunk) for chunk in chunks] == [CHUNK // STEP] * 3 + [1]
    assert [value for chunk in chunks for value in chunk] == prefix_hashes(tokens, "s")
    assert prefix_hashes([*tokens[:-1], -7]) == prefix_hashes(tokens), "not a whole step"
    assert prefix_hashes([*tokens[:1500], -7])[: 1500 // STEP] == prefix_hashes(tokens)[: 1500 // STEP]


@pytest.mark.parametrize("hybrid", [False, True])
def test_hashing_ends_where_nobody_knows_more(hybrid: bool) -> None:
    """A replica's cache far into a prompt is found all the same; of a prompt that nobody has little is hashed."""
    manager, long = make_manager(hybrid), prompt(1, 7000)
    replay_request(manager, [*long, 5], len(long))
    router, _ = make_router(2)
    router.refresh(1, reusable_prefixes(manager.tree, needs_state=hybrid))
    assert len(router._hashes([*long, *prompt(2, 9000)], None, [0, 1])) * STEP == 7 * CHUNK
    assert router.choose([*long, *prompt(2, 9000)]) == 1
    assert len(router._hashes(prompt(3, 9000), None, [0, 1])) * STEP == CHUNK
    first = router.choose(prompt(3, 9000))
    assert first == 0 and router.choose([*prompt(3, 9000), *prompt(4, 50)]) == 0, "it was sent there just now"


# -- choices -----------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    router, _ = make_router(3)
    tokens = prompt(1)
    router.refresh(2, prefix_hashes(tokens)[5:6])
    router.refresh(1, prefix_hashes(tokens)[1:2])
    assert router.choose(tokens) == 2


def test_prompts_that_nobody_has_go_where_least_is_open() -> None:
    router, _ = make_router(3)
    assert [router.choose(prompt(seed)) for seed in range(6)] == [0, 1, 2, 0, 1, 2]
    router.ended(1)
    assert router.choose(prompt(9)) == 1


def test_a_conversation_stays_together_until_its_replica_is_much_busier() -> None:
    router, _ = make_router(2, max_num_seqs=100)
    history = prompt(1, 640)
    first = router.choose(history)
    assert first == 0 and router.choose([*history, *prompt(2, 50)]) == 0, "it was sent there just now"
    for _ in range(640 // LOAD_TOKENS + 2):
        router.replicas[0].num_open += 1
    assert router.choose([*history, *prompt(3, 50)]) == 1


def test_a_full_replica_spills_over() -> None:
    router, _ = make_router(2, max_num_seqs=2)
    history = prompt(1, FULL_TOKENS // 4)
    assert [router.choose(history) for _ in range(3)] == [0, 0, 1]


def test_what_was_sent_counts_until_the_replica_should_have_told() -> None:
    router, clock = make_router(2)
    tokens = prompt(1)
    assert router.choose(tokens) == 0
    router.ended(0)
    router.refresh(0, [])
    assert router.choose(tokens) == 0
    router.ended(0)
    clock.now += RECENT_S + 1
    router.refresh(0, [])
    router.replicas[0].num_open = 1
    assert router.choose(tokens) == 1, "it was evicted there"


def test_a_replica_that_never_tells_is_not_remembered_for_ever() -> None:
    """It has no prefix cache."""
    router, clock = make_router(1)
    for seed in range(50):
        router.choose(prompt(seed))
        clock.now += RECENT_S / 2
    assert len(router.replicas[0].sent) <= 6 * (500 // STEP)


def test_a_cache_that_was_reset_has_nothing() -> None:
    """Neither of what was reported nor of what was sent."""
    router, _ = make_router(2)
    tokens = prompt(1)
    router.refresh(1, prefix_hashes(tokens))
    assert router.choose(tokens) == 1
    router.reset(1)
    assert router.choose(tokens) == 0


def test_replicas_that_are_down_get_nothing() -> None:
    router, _ = make_router(2)
    router.down(0)
    assert [router.choose(prompt(seed)) for seed in range(3)] == [1, 1, 1]
    router.down(1)
    with pytest.raises(NoReplicaError):
        router.choose(prompt(1))
    router.up(0)
    assert router.choose(prompt(1)) == 0 and not router.replicas[0].reported


def test_a_replica_that_comes_back_has_what_it_tells_of_from_then_on() -> None:
    """Also where that is what it had before."""
    router, _ = make_router()
    tokens = prompt(1)
    told = prefix_hashes(tokens)
    router.refresh(1, told)
    router.down(1)
    router.up(1)
    assert router.choose(tokens) == 0, "it starts with nothing cached"
    router.ended(0)
    other = prompt(2)
    told = prefix_hashes(other)
    router.refresh(1, told)
    router.down(1)
    router.up(1)
    router.refresh(1, told)
    assert router.choose(other) == 1


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_a_replica_would_restore_counts_at_its_price(hybrid: bool) -> None:
    spec, long = make_spec(linear=1 if hybrid else 0), prompt(1, 7000)
    tier = HostTier(spec, num_pages=12_000, num_slots=800 if hybrid else 0, fingerprint="")
    manager = Manager(
        spec, num_pages=12_000, num_slots=800 if hybrid else 1, enable_prefix_caching=True, tier=tier
    )  # fmt: skip
    reports = PrefixReports(tier, spec)

    def told() -> tuple[list[int], list[int]]:
        hashes = reusable_prefixes(manager.tree, needs_state=hybrid, listener=reports.on_device)
        return hashes, reports.below(hashes)

    replay_request(manager, [*long, 5], len(long))
    on_device, below = told()
    assert not below
    manager.evict_all()
    assert told() == ([], sorted(on_device, key=list(reports._keys).index))
    router, _ = make_router(2)
    router.refresh(1, *told(), price=0.5)
    turn = [*long, *prompt(2, 100)]
    cached = router._cached(router._hashes(turn, None, [0, 1]), [0, 1])
    assert cached == {0: 0, 1: 0.5 * (len(long) // STEP * STEP)}
    assert router.choose(turn) == 1
    router, _ = make_router(2)
    router.refresh(1, *told(), price=1.0)
    assert router.choose(turn) == 0, "restoring is no cheaper than computing"
    tier.clear()
    assert told() == ([], []) and not reports._keys
    assert reports.price == UNMEASURED_PRICE
    tier.costs.copied(10**9, 1.0)
    tier.costs.computed(1e15, 1.0)
    assert reports.price == min(1.0, spec.kv_bytes_per_token / 1e9 / (spec.flops_per_token / 1e15))


def test_a_choice_costs_little() -> None:
    """Under 100 us of processor time for a prompt of 2,000 tokens, of four replicas (here twice that)."""
    router, _ = make_router(4)
    prompts = [prompt(seed, 2000) for seed in range(50)]
    for index in range(4):
        router.refresh(index, np.random.default_rng(index).integers(0, 2**63, 8000).tolist())
    costs = []
    for tokens in prompts:
        began = time.process_time()
        router.choose(tokens)
        costs.append(time.process_time() - began)
    assert min(costs) < 200e-6  # all prompts are alike, and other processes slow some of them


# -- hits --------------------------------------------------------------------------------------------------------------


def reused(choose: Callable[[list[int]], int], managers: list[Manager], tell: Callable[[int], None]) -> int:
    """Prompt tokens reused over the conversations of the prefix-reuse workload, one request at a time."""
    counts = ReplayCounts()
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    rng = random.Random(3)
    for turn in make_workload("chat", 1000):
        tokens = turn.prompt(prompts, outputs)
        prompts.append(tokens)
        outputs.append([rng.randrange(1000) for _ in range(turn.output_len)])
        index = choose(tokens)
        replay_request(managers[index], tokens + outputs[-1], len(tokens), counts=counts)
        tell(index)
    return counts.num_reused_tokens


@pytest.mark.parametrize("hybrid", [False, True])
def test_four_replicas_keep_the_hits_of_one_cache(hybrid: bool) -> None:
    """At least 90% of one cache's hits with the conversations of ``weft bench prefix``; round robin keeps far fewer."""
    one = reused(lambda tokens: 0, [make_manager(hybrid)], lambda index: None)
    router, _ = make_router(4, max_num_seqs=16)
    managers = [make_manager(hybrid) for _ in range(4)]

    def tell(index: int) -> None:
        router.ended(index)
        router.refresh(index, reusable_prefixes(managers[index].tree, needs_state=hybrid))

    routed = reused(router.choose, managers, tell)
    rng = random.Random(5)
    blind = reused(lambda tokens: rng.randrange(4), [make_manager(hybrid) for _ in range(4)], lambda index: None)
    print(f"reused by one cache {one}, by four routed {routed}, at random {blind}")
    assert routed >= 0.9 * one > 0
    assert blind < 0.6 * one
