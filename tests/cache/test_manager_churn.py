"""Thousands of random actions per seed on tiny pools: long lives reach states that short random examples do not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.cache.fake_memory import FakeMemory, Running
from tests.cache.test_manager_fuzz import make_spec
from tests.whole import covering
from weft.cache.manager import Manager

NUM_ACTIONS = 800


@dataclass
class Churn:
    """Random requests over one manager; ``corpus`` holds the sequences that new prompts branch from."""

    manager: Manager
    random: random.Random
    running: list[Running] = field(default_factory=list)
    corpus: list[tuple[list[int], str | None]] = field(default_factory=lambda: [([0], None)])
    num_forks: int = 0
    num_copies: int = 0
    num_protected: int = 0

    def __post_init__(self) -> None:
        self.memory = FakeMemory(self.manager)

    def act(self) -> None:
        choice = self.random.random()
        if choice < 0.25 or not self.running:
            self.arrive()
        elif choice < 0.85:
            self.step()
        else:
            self.end()

    def arrive(self) -> None:
        rng = self.random
        tokens, salt = rng.choice(self.corpus)
        if rng.random() < 0.2:
            tokens, salt = [], rng.choice([None, None, "a", "b"])
        tokens = tokens[: rng.choice([len(tokens), rng.randint(0, len(tokens))])]
        tokens = tokens + [rng.randint(0, 2) for _ in range(rng.choice([0, 1, 3, 15, 16, 17, 40]))]
        tokens = (tokens or [1])[: self.manager.max_tokens]
        match = self.manager.match(tokens, salt, reuse=rng.random() < 0.95)
        boundaries = [rng.randint(1, len(tokens)) for _ in range(rng.randint(0, 4))]
        lease = self.manager.lease(match, reserve_pages=len(self.running), boundaries=boundaries)
        if lease is None:
            assert self.running, "a request alone must fit"
            return
        self.num_forks += lease.state_fork is not None
        self.num_copies += lease.page_copy is not None
        self.num_protected += lease.write_start > lease.num_cached_tokens
        self.running.append(Running(tokens, lease, lease.num_cached_tokens, salt))

    def step(self) -> None:
        running = self.random.choice(self.running)
        missing = len(running.tokens) - running.fed
        if missing == 0:
            if len(running.tokens) >= self.manager.max_tokens:
                return
            running.tokens.append(self.random.randint(0, 2))
            missing = 1
        if not self.memory.launch(running, min(missing, self.random.choice([1, 5, 16, 64]))):
            self.end()

    def end(self) -> None:
        running = self.running.pop(self.random.randrange(len(self.running)))
        fed = running.lease.num_committed_tokens
        how = self.random.choice(["finish", "finish", "late", "preempt", "nan"])
        if how == "preempt":
            self.manager.preempt(running.lease, running.tokens)
        else:
            known = running.tokens[: max(0, fed - (how == "late"))]
            self.manager.release(running.lease, known, keep=how != "nan")
        self.corpus = [*self.corpus[-15:], (list(running.tokens), running.salt)]

    def check(self) -> None:
        self.manager.check()
        self.memory.check_tree()


@pytest.mark.parametrize(
    ("page_size", "eviction", "policy"),
    covering([1, 4, 16], ["lru", "flops"], ["exact", "aligned", "finish_only"], of=1),
)
def test_random_lives_of_hybrid_requests(policy: str, eviction: str, page_size: int) -> None:
    manager = Manager(
        make_spec(hybrid=True, page_size=page_size),
        num_pages=400 // page_size,
        num_slots=9,
        enable_prefix_caching=True,
        checkpoint_policy=policy,  # type: ignore[arg-type]
        eviction=eviction,
    )
    churn = Churn(manager, random.Random(f"{policy} {eviction} {page_size}"))
    for _ in range(NUM_ACTIONS):
        churn.act()
        churn.check()
    stats = manager.stats()
    assert stats.num_hit_tokens and stats.num_evicted_pages and stats.num_evicted_states
    assert churn.num_forks and churn.num_protected
    assert churn.num_copies or page_size == 1


@pytest.mark.parametrize("eviction", ["lru", "flops"])
def test_random_lives_of_plain_attention_requests(eviction: str) -> None:
    spec = make_spec(hybrid=False, page_size=4)
    manager = Manager(spec, num_pages=70, num_slots=1, enable_prefix_caching=True, eviction=eviction)
    churn = Churn(manager, random.Random(eviction))
    for _ in range(NUM_ACTIONS):
        churn.act()
        churn.check()
    assert manager.stats().num_hit_tokens and manager.stats().num_evicted_pages and churn.num_copies
