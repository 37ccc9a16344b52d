"""The states of a step that verifies drafts.

Job: say which slot gets the state after each position, and which of them is the working slot once it is known how many
drafts were accepted: nothing is copied or computed again. Owns: a lease's spare slots. Does not know: pools, drafts.

A step over the last token and k drafts stores k + 1 states. The one after the last position goes into the working slot,
whose content the step has read, the others into spare slots::

    position     start + 1   start + 2   …   start + k   start + 1 + k
    slot         spare[0]    spare[1]    …   spare[k-1]  working slot

If a drafts are accepted, the slot of position start + 1 + a becomes the working slot, and all others are spare.

The next step may be launched before a is known: it stores into the same slots in the same order, whichever of them it
reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftStates:
    """Of one lease.

    Attributes:
        spare: slots beside the working slot.
        stored: ``(position, slot)`` of the states that the last step stored, ascending, until the next step; of
            several unsettled steps the first.
        snapshot: ``(position, slot)`` of a state to be kept if that position turns out to be reached (``aligned``).
        num_unsettled: launched steps of which it is not known yet how many drafts were accepted.
    """

    spare: list[int] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)
    snapshot: tuple[int, int] | None = None
    num_unsettled: int = 0

    def trim(self, num_drafts: int) -> list[int]:
        """Forget what is stored, and keep spare slots for ``num_drafts`` drafts. Returns the others."""
        self.stored.clear()
        released = self.spare[num_drafts:]
        del self.spare[num_drafts:]
        return released

    def begin(self, start: int, num_drafts: int, state_slot: int) -> list[tuple[int, int]]:
        """The ``(position, slot)`` pairs of a step from ``start``, but for the last position."""
        before = list(zip(range(start + 1, start + 1 + num_drafts), self.spare, strict=False))
        assert len(before) == num_drafts, "a draft has no slot"
        self.stored = [*before, (start + 1 + num_drafts, state_slot)]
        self.num_unsettled = 1
        return before

    def follow(self) -> list[int]:
        """A step is launched before the last one is settled. Returns its slots, in order of positions."""
        assert self.num_unsettled, "there is no step to follow"
        self.num_unsettled += 1
        return [slot for _, slot in self.stored]

    def settle(self, num_accepted: int) -> int:
        """Of the first unsettled step so many drafts were accepted. Returns the slot of the state after them."""
        self.num_unsettled -= 1
        slots = [slot for _, slot in self.stored]
        position = self.stored[num_accepted][0]
        slot = self.choose(position)
        if self.num_unsettled:
            self.stored = list(zip(range(position + 1, position + 1 + len(slots)), slots, strict=True))
        return slot

    def choose(self, position: int) -> int:
        """The slot of the state after ``position`` tokens, which is the working slot from now on."""
        ((chosen, slot),) = [entry for entry in self.stored if entry[0] == position]
        held = {*self.spare, *(slot for _, slot in self.stored)}
        self.spare = sorted(held - {slot})
        self.stored = [entry for entry in self.stored if entry[0] <= chosen]
        return slot

    def latest(self, num_tokens: int) -> int | None:
        """The last position within ``num_tokens`` tokens whose state is there."""
        return max((position for position, _ in self.stored if position <= num_tokens), default=None)

    def slots(self) -> list[int]:
        """Every slot that is held beside the working slot."""
        return self.spare + ([self.snapshot[1]] if self.snapshot is not None else [])
