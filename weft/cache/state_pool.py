"""The pool of recurrent-state slots.

Job: hand out slot ids and take them back. Owns: the free list. Does not know: what a state is, who uses a slot, or any
tensor. Slot 0 is reserved for padding and never handed out. A slot has one owner; states are shared by copying.
"""

from __future__ import annotations


class StatePool:
    """Slot ids ``1 .. num_slots - 1``. A model without recurrent layers has a pool of size 1: nothing to hand out."""

    def __init__(self, num_slots: int) -> None:
        """
        Args:
            num_slots: slots in the pool, the reserved slot 0 included.
        """
        assert num_slots >= 1, "a state pool needs the reserved slot"
        self.num_slots = num_slots
        self._in_use = [False] * num_slots
        self._in_use[0] = True
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Slots that can be handed out in all."""
        return self.num_slots - 1

    def allocate(self) -> int | None:
        """A slot, or None if none is free. Its content is whatever was there before."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._in_use[slot] = True
        return slot

    def release(self, slot: int) -> None:
        assert slot > 0 and self._in_use[slot], f"slot {slot} is released but not in use"
        self._in_use[slot] = False
        self._free.append(slot)

    def check(self) -> None:
        """Assert that every slot is exactly one of reserved, free, in use."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is in the free list twice"
        assert 0 not in free and self._in_use[0], "the reserved slot was handed out or released"
        for slot in range(1, self.num_slots):
            assert (slot in free) != self._in_use[slot], f"slot {slot} is both free and in use, or neither"
