"""Slots of drafts: who gets which, which becomes the working slot, and that none is lost."""

from __future__ import annotations

import random

import pytest

from tests.specs import make_spec
from weft.cache.lease import DraftStates, Lease
from weft.cache.manager import Manager

PROMPT = list(range(40))


def manager_of(**settings: object) -> Manager:
    return Manager(make_spec(), num_pages=60, num_slots=12, enable_prefix_caching=True, **settings)  # type: ignore[arg-type]


def prefilled(manager: Manager) -> Lease:
    lease = manager.lease(manager.match(PROMPT))
    assert lease is not None and manager.allocate(lease, len(PROMPT)) is not None
    manager.allocate_checkpoints(lease, 0, len(PROMPT))
    manager.commit(lease, len(PROMPT))
    manager.confirm(lease, len(PROMPT))
    return lease


def test_the_slot_of_the_accepted_position_becomes_the_working_slot() -> None:
    states = DraftStates(spare=[4, 5, 6])
    assert states.begin(10, 2, 9) == [(11, 4), (12, 5)]
    assert states.choose(12) == 5 and states.spare == [4, 6, 9]
    assert states.stored == [(11, 4), (12, 5)]  # what lies behind is no state of the sequence
    assert states.latest(11) == 11 and states.latest(10) is None
    assert states.choose(11) == 4 and states.spare == [5, 6, 9]


@pytest.mark.parametrize("policy", ["exact", "aligned", "finish_only"])
@pytest.mark.parametrize("seed", range(20))
def test_random_steps_lose_no_slot(policy: str, seed: int) -> None:
    rng, manager = random.Random(seed), manager_of(checkpoint_policy=policy)
    lease, tokens = prefilled(manager), [*PROMPT, 1]
    while len(tokens) < 150:
        start = len(tokens) - 1
        count = manager.drafts.allocate(lease, start, rng.randint(0, 4))
        assert manager.allocate(lease, start + 1 + count) is not None
        pairs = manager.allocate_checkpoints(lease, start, 1 + count, count)
        manager.commit(lease, start + 1 + count)
        manager.check()
        slots = [slot for _, slot in pairs]
        assert len({*slots, lease.state_slot}) == len(slots) + 1, "two states of a step share a slot"
        if count:
            accepted = rng.randint(0, count)
            reached = dict([*pairs[:count], (start + 1 + count, lease.state_slot)])
            manager.drafts.accept(lease, count, accepted)
            assert lease.state_slot == reached[start + 1 + accepted]
            tokens += [rng.randrange(9) for _ in range(accepted)]
        tokens.append(1)
        manager.check()
    kept = rng.randint(len(tokens) - 3, len(tokens))
    if rng.random() < 0.5:
        manager.release(lease, tokens[:kept])
    else:
        manager.preempt(lease, tokens)
    manager.check()
    assert manager.slots.num_free + manager.evictor.num_evictable_slots == manager.slots.capacity


def test_fewer_drafts_where_slots_or_pages_are_short() -> None:
    manager = manager_of()
    lease = prefilled(manager)
    others = [manager.lease(manager.match([7] * 3, salt=str(i))) for i in range(8)]
    assert all(others)
    count = manager.drafts.allocate(lease, 40, 6)
    assert 0 < count < 6 and len(lease.drafts.spare) == count
    taken = manager.pages.allocate(manager.pages.num_free)
    assert taken is not None
    room = len(lease.pages) * manager.spec.page_size - 41
    assert manager.drafts.allocate(lease, 40, 3) == min(count, room)
    assert manager.drafts.allocate(lease, 39 + room, 3) == 1  # to the end of the last page
    manager.pages.unpin(taken)
    manager.pages.release(taken)


def test_a_snapshot_goes_with_the_drafts_that_are_rejected() -> None:
    """Under ``aligned`` a step of drafts that ends at a multiple stores a state there; it counts if all are right."""
    for num_accepted in (0, 2, 3):
        manager = manager_of(checkpoint_policy="aligned")
        lease, alignment = prefilled(manager), 64
        start = alignment - 4
        assert manager.allocate(lease, start) is not None
        manager.commit(lease, start)
        assert manager.drafts.allocate(lease, start, 9) == 3, "it ends where a state has to be kept"
        pairs = manager.allocate_checkpoints(lease, start, 4, 3)
        manager.commit(lease, alignment)
        manager.drafts.accept(lease, 3, num_accepted)
        assert pairs[-1][0] == alignment and lease.num_committed_tokens == start + 1 + num_accepted
        assert (lease.checkpoints.snapshot == pairs[-1]) == (num_accepted == 3)
