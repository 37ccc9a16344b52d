"""Who holds which pages and slots: the cache as the scheduler sees it.

Job: match a prompt against what is cached, lease pages and a state slot to a request, grow the lease, take it back.
Owns: the pools and every live lease. Does not know: tensors, batches, or why a request starts or stops.

This manager reuses nothing between requests: every match is empty. Its interface is the one that a manager with a
prefix tree keeps, so the scheduler need not change::

    match(tokens)   pure: how much of the prompt could be reused
    lease(match)    pin what was matched and take a working state slot
    allocate(...)   grow the lease's pages
    commit(...)     so many tokens of the request are in the cache now
    release(...)    the request has ended     } pages and slot go back;
    preempt(...)    the request will return   } only after its last launched step
    check()         every page and slot has exactly one owner
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.cache.page_pool import PagePool
from weft.cache.spec import CacheSpec
from weft.cache.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is cached: the first ``num_tokens`` tokens can be reused."""

    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds.

    Attributes:
        pages: page ids in order; position ``p`` lives in ``pages[p // page_size]``.
        state_slot: working slot, 0 if the model has no recurrent layers.
        num_cached_tokens: tokens whose KV and state were reused.
        num_committed_tokens: tokens whose KV and state the launched steps have produced.
    """

    pages: list[int] = field(default_factory=list)
    state_slot: int = 0
    num_cached_tokens: int = 0
    num_committed_tokens: int = 0


class Manager:
    """Leases of pages and slots, without reuse."""

    def __init__(self, spec: CacheSpec, *, num_pages: int, num_slots: int) -> None:
        self.spec = spec
        self.pages = PagePool(num_pages)
        self.slots = StatePool(num_slots)
        self._leases: set[Lease] = set()

    @property
    def max_tokens(self) -> int:
        """Tokens that a single request can hold at most."""
        return self.pages.capacity * self.spec.page_size

    def match(self, token_ids: Sequence[int]) -> Match:
        """How much of ``token_ids`` could be reused. Changes nothing."""
        return Match()

    def lease(self, match: Match) -> Lease | None:
        """A lease with a working slot and no pages yet, or None if no slot is free."""
        slot = 0
        if self.spec.num_linear_layers:
            taken = self.slots.allocate()
            if taken is None:
                return None
            slot = taken
        lease = Lease(state_slot=slot, num_cached_tokens=match.num_tokens, num_committed_tokens=match.num_tokens)
        self._leases.add(lease)
        return lease

    def can_allocate(self, lease: Lease | None, num_tokens: int, reserve_pages: int = 0) -> bool:
        """Would ``allocate(lease, num_tokens)`` succeed and leave ``reserve_pages`` free? None: for a fresh lease."""
        held = len(lease.pages) if lease is not None else 0
        return self.spec.pages_for(num_tokens) - held + reserve_pages <= self.pages.num_free

    def allocate(self, lease: Lease, num_tokens: int) -> list[int] | None:
        """Grow the lease until it holds ``num_tokens`` tokens.

        Returns:
            The pages added (often none), or None, and nothing changed, if too few pages are free.
        """
        assert lease in self._leases, "the lease has ended"
        missing = self.spec.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return []
        pages = self.pages.allocate(missing)
        if pages is not None:
            lease.pages.extend(pages)
        return pages

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """The steps launched so far leave the request with exactly ``num_tokens`` tokens in pages and state."""
        assert lease.num_committed_tokens <= num_tokens <= len(lease.pages) * self.spec.page_size
        lease.num_committed_tokens = num_tokens

    def release(self, lease: Lease) -> None:
        """The request has ended and its last launched step is done: take everything back."""
        self._return(lease)

    def preempt(self, lease: Lease) -> None:
        """The request gives way and will come back; its last launched step is done."""
        self._return(lease)

    def _return(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self.pages.release(lease.pages)
        if lease.state_slot:
            self.slots.release(lease.state_slot)
        lease.pages, lease.state_slot = [], 0

    def check(self) -> None:
        """Assert the invariants: every page and slot is reserved, free, or held by exactly one lease."""
        self.pages.check()
        self.slots.check()
        held = [page for lease in self._leases for page in lease.pages]
        assert len(held) == len(set(held)), "two leases hold the same page"
        assert len(held) + self.pages.num_free == self.pages.capacity, "pages leaked"
        slots = [lease.state_slot for lease in self._leases if lease.state_slot]
        assert len(slots) == len(set(slots)), "two leases hold the same slot"
        assert len(slots) + self.slots.num_free == self.slots.capacity, "slots leaked"
