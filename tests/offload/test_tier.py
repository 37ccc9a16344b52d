"""Check what the tier in host memory keeps, finds, refuses and drops."""

from __future__ import annotations

import pytest

from tests.cache.fake_memory import Running
from tests.cache.test_manager_fuzz import make_spec
from tests.offload.fake_host import TieredMemory, request
from weft.cache.manager import Manager
from weft.cache.nodes import as_tokens
from weft.engine.inspection import Inspection
from weft.messages import SchedulerOutput
from weft.offload.costs import RestoreCosts
from weft.offload.restores import MAX_SLICES, SLICES_PER_STEP, Restores
from weft.offload.tier import HostTier
from weft.stats import EngineStats

PROMPT = [i % 7 for i in range(22)]


class House:
    """A manager with a tier, on pages of four tokens."""

    def __init__(
        self, *, hybrid: bool = True, num_pages: int = 20, host_pages: int = 40, policy: str = "write_back"
    ) -> None:
        spec = make_spec(hybrid=hybrid)
        self.tier = HostTier(
            spec, num_pages=host_pages, num_slots=8 if hybrid else 0, fingerprint="m",
            policy=policy, page_budget=3,  # type: ignore[arg-type]
        )  # fmt: skip
        self.manager = Manager(
            spec, num_pages=20, num_slots=6 if hybrid else 1, enable_prefix_caching=True, tier=self.tier
        )
        self.restores = Restores(self.manager, self.tier, 2)
        self.memory = TieredMemory(self.manager, restores=self.restores)

    def serve(self, tokens: list[int], salt: str | None = None, *, keep: bool = True) -> None:
        """Run one request to its end."""
        lease = self.manager.lease(self.manager.match(tokens, salt))
        assert lease is not None
        running = Running(tokens, lease, lease.num_cached_tokens, salt)
        assert self.memory.launch(running, len(tokens) - lease.num_cached_tokens)
        self.manager.release(lease, tokens, keep=keep)

    def evict(self) -> None:
        """Evict everything from the device."""
        assert self.manager.evictor.make_room(self.manager.pages.capacity)
        self.memory.flush()

    def found(self, tokens: list[int], salt: str | None = None) -> int:
        """Number of tokens that a restore would bring."""
        below = self.manager.match(tokens, salt).below
        return below.num_tokens if below is not None else 0


@pytest.mark.parametrize(("hybrid", "expected"), [(True, 22), (False, 20)])
def test_an_evicted_prefix_is_found(hybrid: bool, expected: int) -> None:
    house = House(hybrid=hybrid)
    house.serve(PROMPT)
    assert house.found([*PROMPT, 1]) == 0
    house.evict()
    assert house.found([*PROMPT, 1]) == expected
    assert house.found([*PROMPT[:21], 6, 1]) == (21 if hybrid else 20)  # the state at the prompt's end less one
    assert house.found(PROMPT) == (21 if hybrid else 20)  # one token has to be computed
    assert house.found([9, *PROMPT]) == 0


def test_salts_keep_entries_apart() -> None:
    house = House()
    house.serve(PROMPT, "a")
    house.evict()
    assert house.found([*PROMPT, 1], "a") == 22
    assert not house.found([*PROMPT, 1], "b") and not house.found([*PROMPT, 1])


def test_kv_without_a_state_is_not_restored() -> None:
    house = House()
    house.serve(PROMPT)
    house.evict()
    for entry in house.tier.states.entries():
        house.tier.states.drop(entry)
    assert len(house.tier.pages) == 5 and house.found([*PROMPT, 1]) == 0


def test_a_state_without_kv_is_not_restored() -> None:
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.tier.pages.drop(house.tier.pages.entries()[-1])  # the first page, which was used last
    assert len(house.tier.states) == 2 and house.found([*PROMPT, 1]) == 0


def test_a_state_alone_comes_back_to_kv_on_the_device() -> None:
    house = House()
    house.serve(PROMPT)
    for node in list(house.manager.tree.nodes()):
        for checkpoint in list(node.checkpoints.values()):
            house.tier.state_leaves(checkpoint)
            house.manager.slots.release(house.manager.tree.take_checkpoint(checkpoint, lost=True))
    house.memory.flush()
    below = house.manager.match([*PROMPT, 1]).below
    assert below is not None and below.num_tokens == 22 and not below.pages


def restore(house: House, tokens: list[int], name: str = "r") -> None:
    assert house.restores.restore_first(request(name, tokens), house.manager.match(tokens), 0)
    while house.restores.is_active:
        house.memory.flush()
        while house.memory.in_flight:
            house.memory.finish()
    house.memory.check_tree()


def test_a_restore_makes_a_hit() -> None:
    house = House()
    house.serve(PROMPT)
    house.evict()
    restore(house, [*PROMPT, 1])
    match = house.manager.match([*PROMPT, 1])
    assert match.num_tokens == 22 and match.below is None
    lease = house.manager.lease(match)
    assert lease is not None
    report = house.restores.admitted(request("r", [*PROMPT, 1]), lease)
    assert str(report).startswith("KV and state of 22 tokens restored from host memory in ")
    assert "1 tokens computed" in str(report)
    assert house.tier.stats()["num_external_hit_tokens"] == 22


def test_a_lookup_goes_on_in_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.offload.tier.KEYS_AHEAD", 2)
    monkeypatch.setattr("weft.offload.restores.KEYS_PER_STEP", 2)
    house = House()
    house.serve(PROMPT)
    house.evict()
    tokens, asked = as_tokens([*PROMPT, 1]), request("r", [*PROMPT, 1])
    for _ in range(2):
        house.restores.begin_step(1)
        match = house.manager.match(tokens)
        assert match.below is not None and match.below.is_pending
        assert house.restores.restore_first(asked, match, 1)
        assert not house.restores.is_active and not house.restores.still_waits(asked)
    house.restores.begin_step(1)
    assert house.restores.restore_first(asked, house.manager.match(tokens), 1) and house.restores.is_active


def test_a_lookup_beside_no_request_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.offload.tier.KEYS_AHEAD", 2)
    monkeypatch.setattr("weft.offload.restores.KEYS_PER_STEP", 2)
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.restores.begin_step(1)
    house.restores.begin_step(0)
    assert house.found([*PROMPT, 1]) == 22


def test_a_lookup_computes_no_keys_beyond_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.offload.tier.KEYS_AHEAD", 2)
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.tier.keys_left = 100
    assert house.found([*PROMPT, *range(400)]) == 22
    assert house.tier.keys_left == 94  # six keys: five pages are there, and the next one is not


def test_restores_of_different_prefixes_overlap() -> None:
    house, other = House(), [8, *PROMPT]
    house.serve(PROMPT)
    house.evict()
    house.serve(other)
    house.evict()
    longer = [*PROMPT, 5]  # its entries are those of the first
    for name, tokens in (("a", [*PROMPT, 1]), ("b", longer), ("c", [*other, 1])):
        house.restores._slice_pages = 5  # one slice each
        assert house.restores.restore_first(request(name, tokens), house.manager.match(tokens), 0)
    assert [active.request_id for active in house.restores._active] == ["a", "c"]
    house.restores.check()
    while house.restores.is_active:
        house.memory.flush()
        while house.memory.in_flight:
            house.memory.finish()
    house.memory.check_tree()
    assert all(
        house.manager.match(tokens).num_tokens == len(tokens) - 1 for tokens in ([*PROMPT, 1], longer, [*other, 1])
    )


def test_a_restore_with_slices_to_order_is_the_only_one() -> None:
    house, other = House(), [8, *PROMPT]
    house.serve(PROMPT)
    house.evict()
    house.serve(other)
    house.evict()
    house.restores._slice_pages = 1
    assert house.restores.restore_first(request("a", [*PROMPT, 1]), house.manager.match([*PROMPT, 1]), 0)
    house.memory.flush()
    house.memory.finish()  # three slices are in flight, and one is not ordered
    assert house.restores.restore_first(request("b", [*other, 1]), house.manager.match([*other, 1]), 0)
    assert [active.request_id for active in house.restores._active] == ["a"]


def test_a_step_orders_few_slices() -> None:
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.restores._slice_pages = 1
    house.restores.begin_step(0)
    assert house.restores.restore_first(request("a", [*PROMPT, 1]), house.manager.match([*PROMPT, 1]), 0)
    assert [len(house.memory.flush().restores) for _ in range(3)] == [SLICES_PER_STEP, SLICES_PER_STEP, 0]
    assert len(house.memory.in_flight) == MAX_SLICES
    house.memory.finish()
    assert len(house.memory.flush().restores) == 1


def test_a_restore_that_stops_keeps_no_places() -> None:
    """Neither of slices that were ordered, nor of pages and a state that were not."""
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.restores._slice_pages = 1
    match = house.manager.match([*PROMPT, 1])
    assert house.restores.restore_first(request("a", [*PROMPT, 1]), match, 0)
    house.memory.flush()
    assert match.below is not None and match.below.state is not None
    entries = [*match.below.pages, match.below.state]
    assert len(house.memory.in_flight) == 2 and all(entry.pins for entry in entries)
    assert not house.restores.give_up()
    while house.memory.in_flight:
        house.memory.finish()
    assert not house.restores.is_active and not any(entry.pins for entry in entries)


def test_a_restored_prefix_was_used_last() -> None:
    house, other = House(host_pages=10), [8, *PROMPT]
    for tokens in (PROMPT, other):
        house.serve(tokens)
        house.evict()
    restore(house, [*PROMPT, 1])
    held = list(house.tier.pages._entries.values())
    match = house.manager.match([*other, 1])
    assert match.below is not None
    assert {entry.key for entry in held[:5]} == {entry.key for entry in match.below.pages}


def test_entries_of_a_restore_are_not_evicted_meanwhile() -> None:
    house = House(host_pages=5)
    house.serve(PROMPT)
    house.evict()
    match = house.manager.match([*PROMPT, 1])
    assert house.restores.restore_first(request("r", PROMPT), match, 0)
    house.serve([9] * 20)
    assert house.manager.evictor.make_room(3)
    house.memory.flush()
    assert match.below is not None and all(house.tier.pages.holds(entry) for entry in match.below.pages)


def test_nan_drops_the_path_in_both_tiers() -> None:
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.serve([*PROMPT, 1, 2], keep=False)
    assert len(house.tier.pages) == len(house.tier.states) == 0


def test_a_broken_step_takes_back_what_it_should_have_stored() -> None:
    house = House()
    house.serve(PROMPT)
    assert house.manager.evictor.make_room(house.manager.pages.capacity)
    stores, _, _ = house.restores.take_orders()
    assert house.found([*PROMPT, 1]) == 22
    house.restores.broke(SchedulerOutput(1, [], stores=stores))
    assert house.found([*PROMPT, 1]) == 0 and len(house.tier.pages) == 0


def test_reset_empties_both_tiers() -> None:
    house = House()
    house.serve(PROMPT)
    house.evict()
    assert house.manager.reset() and house.found([*PROMPT, 1]) == 0
    assert not house.tier.has_orders


def test_selective_writes_copy_what_was_reused() -> None:
    house = House(policy="write_through_selective")
    house.serve(PROMPT)
    house.evict()
    assert house.found([*PROMPT, 1]) == 0  # nobody had reused it
    house.serve(PROMPT)
    house.serve([*PROMPT, 1])
    for _ in range(3):
        house.memory.flush()
    assert len(house.tier.pages) == 5
    house.evict()
    assert house.found([*PROMPT, 2]) == 22


def test_restores_that_take_longer_than_computing_are_refused() -> None:
    costs = RestoreCosts()
    assert costs.refusal(10**9, 1.0) == ""  # nothing was measured
    costs.copied(10**9, 0.1)
    costs.computed(1e12, 1.0)
    assert costs.refusal(10**9, 1e12) == ""
    assert costs.refusal(10**9, 1e10) == "restoring would take 102 ms, computing again 10 ms"
    costs.restored(0.15, 0.1)
    costs.restored(1.1, 0.1)  # it waited for long steps of others
    assert costs.refusal(10**9, 1e10) == "restoring would take 150 ms, computing again 10 ms"
    house = House()
    house.tier.costs = costs
    house.serve(PROMPT)
    house.evict()
    match = house.manager.match([*PROMPT, 1])
    assert match.below is not None and match.below.refused
    assert not house.restores.restore_first(request("r", PROMPT), match, 0)
    assert house.tier.stats()["num_refused_restores"] == 1
    lease = house.manager.lease(match)
    assert lease is not None and "host memory has 22 tokens, but restoring would take" in lease.report.reason


def test_a_snapshot_shows_what_the_tier_has() -> None:
    house = House()
    house.serve(PROMPT)
    inspection = Inspection(house.manager)

    def below() -> list[tuple[int, list[int]]]:
        return [(node.num_pages_below, node.states_below) for node in inspection.snapshot(EngineStats()).nodes[1:]]

    assert below() == [(0, [])]
    while house.manager.slots.num_free:
        house.manager.evictor.take_slot()
    house.manager.evictor.take_slot()
    (node,) = inspection.snapshot(EngineStats()).nodes[1:]
    assert node.states_below and node.states_below == [position for position, _ in node.lost_states]
    house = House()
    house.serve(PROMPT)
    house.evict()
    inspection = Inspection(house.manager)
    assert below() == []
    assert house.restores.restore_first(request("r", PROMPT), house.manager.match([*PROMPT, 1]), 0)
    while house.restores.is_active:
        house.memory.flush()
        house.memory.finish()
    assert below() == [(5, [22])]
    house.tier.clear()
    assert below() == [(0, [])]
