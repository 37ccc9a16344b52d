"""Random lives of requests on tiny pools with a tiny tier below: every restored prefix is what a cold run computes."""

from __future__ import annotations

import random
from collections import Counter

from tests.cache.fake_memory import Running
from tests.cache.test_manager_fuzz import make_spec
from tests.offload.fake_host import TieredMemory, request
from weft.cache.manager import Manager
from weft.messages import SchedulerOutput
from weft.offload.restores import Restores
from weft.offload.tier import HostTier

ACTIONS = {
    "come": 6, "try_again": 7, "step": 12, "end": 5, "copy": 6, "copied": 6,
    "settle": 2, "needs_room": 0.2, "breaks": 0.2, "reset": 0.1,
}  # fmt: skip


class Life:
    """Requests come, prefill, decode, end and return; prefixes move down and up in between; steps break."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        hybrid, page_size = rng.random() < 0.6, rng.choice([1, 4, 4, 16])
        spec = make_spec(hybrid=hybrid, page_size=page_size)
        self.tier = HostTier(
            spec,
            num_pages=rng.randint(1, 80),
            num_slots=rng.randint(1, 12) if hybrid else 0,
            fingerprint="a model",
            policy=rng.choice(["write_back", "write_back", "write_through_selective"]),
            page_budget=3,
        )
        self.manager = Manager(
            spec,
            num_pages=rng.randint(100 // page_size + 4, 160 // page_size + 6),
            num_slots=rng.randint(4, 9) if hybrid else 1,
            enable_prefix_caching=True,
            checkpoint_policy=rng.choice(["exact", "exact", "aligned", "finish_only"]),
            eviction=rng.choice(["lru", "flops"]),
            tier=self.tier,
        )
        self.restores = Restores(self.manager, self.tier, rng.randint(1, 6))
        self.memory = TieredMemory(self.manager, restores=self.restores)
        self.running: list[Running] = []
        self.waiting: list[tuple[str, list[int], str | None]] = []
        self.seen: list[tuple[list[int], str | None]] = [([0], None)]
        self.count = 0
        self.found: Counter[str] = Counter()

    def act(self) -> None:
        getattr(self, self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0])()
        self.check()

    def come(self) -> None:
        rng = self.rng
        old, salt = rng.choice(self.seen)
        keep = len(old) if rng.random() < 0.5 else rng.randint(0, len(old))
        tokens = old[:keep] + [rng.randint(0, 1) for _ in range(rng.choice([1, 2, 9, 40]))]
        self.count += 1
        salt = rng.choice([None, "a", "b"]) if rng.random() < 0.2 else salt
        self.admit(f"r{self.count}", tokens[: min(95, self.manager.max_tokens)], salt)

    def try_again(self) -> None:
        if self.waiting:
            self.admit(*self.waiting.pop(0))

    def admit(self, name: str, tokens: list[int], salt: str | None) -> None:
        version = self.manager.tree.version
        match = self.manager.match(tokens, salt)
        assert self.manager.tree.version == version
        if match.below is not None:
            assert match.num_tokens < match.below.num_tokens <= len(tokens)
        if self.restores.restore_first(request(name, tokens), match, len(self.running)):
            self.waiting.append((name, tokens, salt))
            return
        match = self.manager.match(tokens, salt)
        lease = self.manager.lease(match, boundaries=[p for p in (3, 7) if p <= len(tokens)])
        if lease is None:
            assert self.running or self.restores.is_active, "a request alone must fit"
            return
        report = self.restores.admitted(request(name, tokens), lease)
        assert report.num_restored_tokens <= lease.num_cached_tokens
        self.found["restored tokens used"] += report.num_restored_tokens
        self.running.append(Running(list(tokens), lease, salt=salt))

    def copy(self) -> None:
        self.memory.flush()

    def settle(self) -> None:
        """The restore in flight comes to its end, and every waiting request tries again."""
        for _ in range(20):
            self.memory.flush()
            self.copied()
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            self.admit(*each)

    def copied(self) -> None:
        if self.memory.in_flight:
            self.memory.finish()

    def needs_room(self) -> None:
        self.restores.give_up()

    def breaks(self) -> None:
        """A step raised before its copies ran."""
        if self.running:
            return
        stores, restores, _ = self.restores.take_orders()
        self.restores.broke(SchedulerOutput(1, [], stores=stores, restores=restores))

    def reset(self) -> None:
        if self.manager.reset():
            assert len(self.tier.pages) == len(self.tier.states) == 0

    def step(self) -> None:
        if not self.running:
            return
        running = self.rng.choice(self.running)
        fed = running.fed if running.started else running.lease.num_cached_tokens
        running.fed = fed
        missing = len(running.tokens) - fed
        if missing == 0:
            if len(running.tokens) >= min(100, self.manager.max_tokens):
                return
            running.tokens.append(self.rng.randint(0, 1))
            missing = 1
        self.memory.launch(running, self.rng.randint(1, missing))

    def end(self) -> None:
        if not self.running:
            return
        running = self.running.pop(self.rng.randrange(len(self.running)))
        if not running.started:  # its copies run with its first step
            self.memory.start(running)
        how = self.rng.choices(["release", "preempt", "nan"], [8, 2, 0.3])[0]
        if how == "preempt":
            self.manager.preempt(running.lease, running.tokens)
        else:
            self.manager.release(running.lease, running.tokens, keep=how != "nan")
        self.seen = [*self.seen, (running.tokens, running.salt)][-12:]

    def check(self) -> None:
        self.manager.check()
        self.restores.check()
        self.memory.check_tree()
        if not self.running and not self.restores.is_active:
            pages, slots = self.manager.pages, self.manager.slots
            assert pages.num_free + pages.num_evictable == pages.capacity, "pages stay pinned without a lease"
            assert slots.num_free + self.manager.evictor.num_evictable_slots == slots.capacity
            assert self.tier.has_orders or not any(entry.pins for entry in self.tier.pages.entries())


def test_restored_prefixes_are_those_of_cold_runs() -> None:
    found: Counter[str] = Counter()
    for seed in range(40):
        life = Life(seed)
        for _ in range(400):
            life.act()
        found.update(life.found)
        found.update(life.tier.stats())
    assert found["num_restores"] > 150 and found["restored tokens used"] > 900
    assert found["num_failed_restores"]
