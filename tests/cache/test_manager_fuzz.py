"""Random lives of requests on tiny pools: invariants after every action, every read is what a cold run would read."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests import specs
from tests.cache.fake_memory import FakeMemory, Running
from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec

TOKENS = st.integers(0, 1)


def make_spec(*, hybrid: bool, page_size: int = 4) -> CacheSpec:
    return specs.make_spec(page_size=page_size, linear=3 if hybrid else 0, flops_per_token=10.0, flops_per_pair=0.1)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, prefill in chunks, decode, are preempted, finish or are aborted, in any order."""

    @initialize(
        hybrid=st.booleans(),
        num_pages=st.integers(6, 30),
        num_slots=st.integers(2, 9),
        policy=st.sampled_from(["exact", "exact", "aligned", "finish_only"]),
        eviction=st.sampled_from(["lru", "flops"]),
        enabled=st.sampled_from([True, True, True, False]),
        page_size=st.sampled_from([1, 4, 16]),
    )
    def build(
        self, hybrid: bool, num_pages: int, num_slots: int, policy: str, eviction: str, enabled: bool, page_size: int
    ) -> None:
        self.manager = Manager(
            make_spec(hybrid=hybrid, page_size=page_size),
            num_pages=num_pages,
            num_slots=num_slots if hybrid else 1,
            enable_prefix_caching=enabled,
            checkpoint_policy=policy,  # type: ignore[arg-type]
            eviction=eviction,
        )
        self.memory = FakeMemory(self.manager)
        self.running: list[Running] = []
        self.seen: list[tuple[list[int], str | None]] = [([0], None)]

    def lease(self, tokens: list[int], salt: str | None, reuse: bool = True) -> None:
        tokens = tokens[: self.manager.max_tokens]
        version = self.manager.tree.version
        match = self.manager.match(tokens, salt, reuse=reuse)
        assert self.manager.tree.version == version and match.num_tokens < len(tokens)
        lease = self.manager.lease(match, boundaries=[p for p in (3, 7) if p <= len(tokens)])
        if lease is None:
            assert self.running, "a request alone must fit"
            return
        assert lease.num_cached_tokens <= match.num_tokens
        assert lease.write_start >= lease.num_cached_tokens
        self.running.append(Running(list(tokens), lease, salt=salt))

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=70), salt=st.sampled_from([None, None, None, "a"]))
    def new_prompt(self, tokens: list[int], salt: str | None) -> None:
        self.lease(tokens, salt)

    @rule(data=st.data(), more=st.lists(TOKENS, max_size=40), reuse=st.sampled_from([True, True, True, False]))
    def related_prompt(self, data: st.DataObject, more: list[int], reuse: bool) -> None:
        old, salt = data.draw(st.sampled_from(self.seen))
        keep = data.draw(st.integers(0, len(old)))
        tokens = old[:keep] + more
        if tokens:
            self.lease(tokens, salt, reuse)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def step(self, data: st.DataObject, num_tokens: int) -> None:
        running = data.draw(st.sampled_from(self.running))
        fed = running.fed if running.started else running.lease.num_cached_tokens
        running.fed = fed
        missing = len(running.tokens) - fed
        if missing == 0:  # decode
            if len(running.tokens) >= self.manager.max_tokens:
                return
            running.tokens.append(num_tokens % 2)
            missing = 1
        num_tokens = min(num_tokens, missing)
        free = self.manager.pages.num_free + self.manager.pages.num_evictable
        launched = self.memory.launch(running, num_tokens)
        needed = self.manager.spec.pages_for(fed + num_tokens) - len(running.lease.pages)
        assert launched or needed > free, "pages could have been had"
        assert launched or len(self.running) > 1 or fed == running.lease.num_cached_tokens, "alone it finds pages"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), known=st.sampled_from([0, 0, 0, 1]), how=st.sampled_from(["release", "preempt", "nan"]))
    def end(self, data: st.DataObject, known: int, how: str) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        fed = running.lease.num_committed_tokens
        tokens = running.tokens[: fed - known] if how == "release" else running.tokens
        if how == "preempt":
            self.manager.preempt(running.lease, tokens)
        else:
            self.manager.release(running.lease, tokens, keep=how != "nan")
        self.seen.append((running.tokens, running.salt))
        self.seen = self.seen[-20:]

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        self.memory.check_tree()
        if not self.running:
            pages, slots = self.manager.pages, self.manager.slots
            assert pages.num_free + pages.num_evictable == pages.capacity, "pages stay pinned without a lease"
            assert slots.num_free + self.manager.evictor.num_evictable_slots == slots.capacity


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
