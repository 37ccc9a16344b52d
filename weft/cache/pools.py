"""The pools of KV pages and of recurrent-state slots: free lists, and the reference counts and pins of pages.

Do not know: the content of a page or slot, who uses it, or any tensor. Page 0 and slot 0 are reserved for padding and
never handed out.

A *reference* keeps a page's content. Every tree node that lists a page has a reference, and so has the request that
computed it. A *pin* marks a page that a running request reads. Pages in use without a pin are freed by evicting their
tree nodes. A slot has one owner; states are shared by copying.
"""

from collections.abc import Iterable


class PagePool:
    """Reference-counted page ids ``1 .. num_pages - 1``."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a page pool needs the reserved page and at least one more"
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._references[0] = 1
        self._pins = [0] * num_pages
        self._num_pinned = 0
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Number of pages in use without a pin."""
        return self.capacity - len(self._free) - self._num_pinned

    @property
    def capacity(self) -> int:
        """Total number of pages that can be handed out."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages with one reference and one pin each. Returns None, and takes nothing, if fewer are
        free."""
        left = len(self._free) - count
        if left < 0:
            return None
        pages = self._free[: -count - 1 : -1]
        del self._free[left:]
        references, pins = self._references, self._pins
        for page in pages:
            references[page] = pins[page] = 1
        self._num_pinned += count
        return pages

    def references(self, page: int) -> int:
        return self._references[page]

    def pins(self, page: int) -> int:
        return self._pins[page]

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each of ``pages``, which must be in use."""
        references = self._references
        for page in pages:
            assert page > 0 and references[page] > 0, f"page {page} is not in use"
            references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page. A page without references is free again."""
        references, pins, free = self._references, self._pins, self._free
        for page in pages:
            left = references[page] - 1
            assert page > 0 and left >= 0, f"page {page} is released more often than it was taken"
            references[page] = left
            if not left:
                assert not pins[page], f"page {page} is still needed by a running request"
                free.append(page)

    def pin(self, pages: Iterable[int]) -> None:
        """Add a pin to each of ``pages``, which must be in use."""
        pins = self._pins
        for page in pages:
            assert self._references[page] > 0, f"page {page} is not in use"
            self._num_pinned += pins[page] == 0
            pins[page] += 1

    def unpin(self, pages: Iterable[int]) -> None:
        pins, num_unpinned = self._pins, 0
        for page in pages:
            left = pins[page] - 1
            assert left >= 0, f"page {page} is unpinned more often than it was pinned"
            pins[page] = left
            num_unpinned += not left
        self._num_pinned -= num_unpinned

    def check(self) -> None:
        """Assert that every page is exactly one of reserved, free, in use, and that the pin count adds up."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert 0 not in free and self._references[0] == 1, "the reserved page was handed out or released"
        for page in range(1, self.num_pages):
            assert (page in free) == (self._references[page] == 0), f"page {page} is both free and in use, or neither"
            assert self._pins[page] <= self._references[page], f"page {page} has more pins than references"
        assert self._num_pinned == sum(count > 0 for count in self._pins), "pinned pages are miscounted"


class StatePool:
    """Slot ids ``1 .. num_slots - 1``. A model without recurrent layers has an empty pool of size 1."""

    def __init__(self, num_slots: int) -> None:
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
        """Total number of slots that can be handed out."""
        return self.num_slots - 1

    def allocate(self) -> int | None:
        """Allocate a slot, or return None if none is free. The content of the slot is undefined."""
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
