"""The pool of KV pages: which are free, and how many users each of the others has.

Job: hand out page ids, count references, take pages back. Owns: the free list and the counts.
Does not know: what is in a page, who uses it, or any tensor. Page 0 is reserved for padding and never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Reference-counted page ids ``1 .. num_pages - 1``."""

    def __init__(self, num_pages: int) -> None:
        """
        Args:
            num_pages: pages in the pool, the reserved page 0 included.
        """
        assert num_pages >= 2, "a page pool needs the reserved page and at least one more"
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._references[0] = 1
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one reference each, or None (and nothing taken) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def references(self, page: int) -> int:
        return self._references[page]

    def retain(self, pages: Iterable[int]) -> None:
        """One more user for each of ``pages``, which must be in use."""
        for page in pages:
            assert page > 0 and self._references[page] > 0, f"page {page} is not in use"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less; a page without users is free again."""
        for page in pages:
            assert page > 0 and self._references[page] > 0, f"page {page} is released more often than it was taken"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check(self) -> None:
        """Assert that every page is exactly one of reserved, free, in use."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert 0 not in free and self._references[0] == 1, "the reserved page was handed out or released"
        for page in range(1, self.num_pages):
            assert (page in free) == (self._references[page] == 0), f"page {page} is both free and in use, or neither"
