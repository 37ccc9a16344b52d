"""Pages and slots of steps that verify drafts.

The module finds room for drafts and chooses the slots for the states after them. The slot of the last accepted position
becomes the working slot. The slots belong to the leases (``cache/lease.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from weft.cache.eviction import Evictor
from weft.cache.lease import Lease
from weft.cache.pools import StatePool
from weft.cache.spec import CacheSpec
from weft.cache.state_plan import StatePlan


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """Slots of drafts. The fields are those of the manager; ``allocate_pages`` is ``Manager.allocate``."""

    spec: CacheSpec
    slots: StatePool
    evictor: Evictor
    states: StatePlan
    allocate_pages: Callable[[Lease, int], list[int] | None]

    def allocate(self, lease: Lease, start: int, num_drafts: int) -> int:
        """Allocate pages and slots for drafts. The step begins at ``start`` with the last token. Returns how many of
        ``num_drafts`` drafts it may verify. Under ``aligned`` a step ends at a position whose state has to be
        stored."""
        if self.states.at_multiples:
            num_drafts = min(num_drafts, self.states.alignment - 1 - start % self.states.alignment)
        if lease.state_slot:
            spare = lease.drafts.spare
            while len(spare) < num_drafts and (slot := self.evictor.take_slot()) is not None:
                spare.append(slot)
            num_drafts = min(num_drafts, len(spare))
        if num_drafts and self.allocate_pages(lease, start + 1 + num_drafts) is None:
            num_drafts = max(0, len(lease.pages) * self.spec.page_size - start - 1)
        return num_drafts

    def trim(self, lease: Lease, num_drafts: int) -> None:
        """Begin a step: drop the states of the previous step's drafts, and free the slots for more than ``num_drafts``
        drafts."""
        for slot in lease.drafts.trim(num_drafts):
            self.slots.release(slot)

    def store(self, lease: Lease, start: int, num_drafts: int) -> list[tuple[int, int]]:
        """The ``(position, slot)`` pairs of the states that a step from ``start`` stores, if there are states. Call it
        when the step is launched."""
        checkpoints, end = lease.drafts.begin(start, num_drafts, lease.state_slot), start + 1 + num_drafts
        slot = self.evictor.take_slot() if self.states.takes_snapshot(end) else None
        if slot is not None:
            lease.drafts.snapshot = (end, slot)
            checkpoints.append((end, slot))
        return checkpoints

    def follow(self, lease: Lease, start: int) -> tuple[list[tuple[int, int]], int]:
        """The ``(position, slot)`` pairs of a step that follows an unsettled one, if that is accepted wholly up to
        ``start``, and the slot of the state after its last token."""
        *before, last = lease.drafts.follow()
        return list(zip(range(start + 1, start + 1 + len(before)), before, strict=True)), last

    def accept(self, lease: Lease, num_drafts: int, num_accepted: int) -> None:
        """Apply the acceptance of the first unsettled step that verified drafts: the first ``num_accepted`` of
        ``num_drafts``."""
        assert num_accepted <= num_drafts, "more tokens than were fed"
        lease.num_committed_tokens -= num_drafts - num_accepted
        if lease.drafts.stored:
            lease.state_slot = lease.drafts.accept(num_accepted)
        snapshot, lease.drafts.snapshot = lease.drafts.snapshot, None
        if snapshot is not None and snapshot[0] == lease.num_committed_tokens:
            self.keep_snapshot(lease, snapshot)
        elif snapshot is not None:
            self.slots.release(snapshot[1])

    def rewind(self, lease: Lease, num_tokens: int) -> None:
        """Cut an accepted run to ``num_tokens`` tokens, if a state up to there is stored."""
        position = lease.drafts.latest(num_tokens)
        if position is not None:
            lease.num_committed_tokens, lease.state_slot = position, lease.drafts.choose(position)

    def keep_snapshot(self, lease: Lease, snapshot: tuple[int, int]) -> None:
        """Replace the snapshot of a decoding request by ``(position, slot)``, and free the slot of the previous one."""
        if lease.checkpoints.snapshot is not None:
            self.slots.release(lease.checkpoints.snapshot[1])
        lease.checkpoints.snapshot = snapshot
