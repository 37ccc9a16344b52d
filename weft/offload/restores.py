"""Restores: a prefix comes from host memory into the device's prefix tree, and then its request is admitted.

Job: decide when a waiting request gets a restore, order its copies in slices, insert the prefix into the tree when the
last slice is done. Owns: the restore in flight, and the lease of the pages and the slot that it fills. Does not know:
tensors, rows, budgets.

A restored prefix becomes a part of the tree, so the request then hits it like any other. Several requests share one
restore. The next restore begins when all slices of the one before are ordered, so none takes bandwidth from another.
Pages are allocated slice by slice: evicting them copies as much to the host as the slice copies from there::

    waiting ──look-up finds a longer prefix below──▶ restore in flight ──last slice done──▶ in the tree ──▶ admitted
                                                      (waits, others pass)

A request gets one restore per admission. If its prefix is evicted again before that, the request computes it.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any

from weft.cache.lease import Lease
from weft.cache.manager import Manager
from weft.cache.match import Match
from weft.cache.tier import Below
from weft.messages import FileOrder, SchedulerOutput, Transfer
from weft.offload.disk_tier import DiskEntry
from weft.offload.loads import Loads
from weft.offload.reports import PrefixReports
from weft.offload.restore_lease import begin_lease
from weft.offload.store import Entry
from weft.offload.tier import HostTier
from weft.outputs import CacheReport
from weft.request import Request

MAX_SLICES, SLICES_PER_STEP = 4, 2
"""Upper bounds on slices that are ordered and not done, and on slices that one step orders. More would hold back the
copies of evicted entries. The link copies slices while the host orders the next ones."""

KEYS_PER_STEP = 512
"""Keys of pages that the lookups of one step compute while requests run, in less than a millisecond."""

FILES_S = 2.0
"""How long a request waits for files, before it is known how long computing its prefix would take."""


@dataclass(slots=True, eq=False)
class Restore:
    """A restore in flight.

    Attributes:
        request_id: the request that it began for.
        lease: its locked path, pages and slot.
        below: what it reads.
        entries: the entries that it reads.
        begun: time of the begin.
        num_before: tokens that the request could reuse without it.
        num_ordered: pages that were ordered.
        copy_seconds: seconds of its finished copies.
        is_complete: whether everything was ordered.
        outstanding: slices that are ordered and not done, by number: the copy, and the entries that the copy reads.
        failed: whether its content is not to be used.
    """

    request_id: str
    lease: Lease
    below: Below
    entries: set[Entry]
    begun: float
    num_before: int
    num_ordered: int = 0
    copy_seconds: float = 0.0
    is_complete: bool = False
    outstanding: dict[int, tuple[Transfer, list[Entry]]] = field(default_factory=dict)
    failed: bool = False

    @property
    def unordered(self) -> list[Entry]:
        """Entries that no slice reads yet."""
        return [] if self.is_complete else _entries(self.below)[self.num_ordered :]


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore: reusable tokens before and after it, and its seconds."""

    num_before: int
    num_tokens: int
    seconds: float


class Restores:
    """Restores of one scheduler.

    Args:
        slice_pages: most pages of one slice.
    """

    def __init__(self, manager: Manager, tier: HostTier, slice_pages: int) -> None:
        self.tier, self.reports = tier, PrefixReports(tier, manager.spec)
        self._manager, self._slice_pages = manager, max(1, slice_pages)
        self._active: list[Restore] = []  # in the order of their begins; only the last may have slices to order
        self._orders: list[Transfer] = []
        self._had: dict[str, Restored | None] = {}
        self._blocked: set[str] = set()  # until the restore or the load in flight ends
        self._no_room: tuple[str, tuple[int, int]] | None = (
            None  # a request that did not fit, and the room that there was
        )
        self._confirmed: list[int] = []
        self._max_slices = MAX_SLICES
        self._loads = Loads(tier)
        self._deadlines: dict[str, float] = {}  # of requests that wait for files

    # -- waiting requests ------------------------------------------------------------------------------------------

    def still_waits(self, request: Request) -> bool:
        """Whether a request waits for what is in flight. Its prefix need not be looked up again before that ends."""
        return request.request_id in self._blocked and not self._is_late(request)

    def did_not_fit(self, request: Request) -> None:
        """Note that a request cannot be admitted now, for lack of pages or slots."""
        self._no_room = request.request_id, self._room

    def lacks_room(self, request: Request) -> bool:
        """Whether a request did not fit, and no more room has come since. Its prefix need not be looked up again."""
        if self._no_room is None or self._no_room[0] != request.request_id:
            return False
        return all(now <= before for now, before in zip(self._room, self._no_room[1], strict=True))

    @property
    def _room(self) -> tuple[int, int]:
        """Numbers of pages and of slots that are free, or free when needed."""
        manager = self._manager
        slots = manager.slots.num_free + manager.evictor.num_evictable_slots
        return manager.pages.num_free + manager.pages.num_evictable, slots

    def _wake(self) -> None:
        """Let waiting requests be looked up again, because a restore or a load has ended."""
        self._blocked.clear()
        self._no_room = None

    def _is_late(self, request: Request) -> bool:
        """Whether a request has waited for files as long as computing its prefix would take."""
        deadline = self._deadlines.get(request.request_id)
        return deadline is not None and time.monotonic() >= deadline

    def begin_step(self, num_running: int) -> None:
        """Bound what a step may look up and order, so that running requests need not wait for it."""
        self.tier.keys_left = KEYS_PER_STEP if num_running else inf
        self._max_slices = SLICES_PER_STEP if num_running else MAX_SLICES

    def restore_first(self, request: Request, match: Match, num_running: int) -> bool:
        """Begin a restore for a waiting request if that pays. Returns whether the request waits for a restore or for
        its lookup. Other requests then pass it."""
        if match.below is not None and match.below.is_pending:
            return True
        waits = self._begin_restore(request, match, num_running)
        (self._blocked.add if waits else self._blocked.discard)(request.request_id)
        return waits

    def _begin_restore(self, request: Request, match: Match, num_running: int) -> bool:
        """Begin a restore, or a load of its files, unless one is in flight. Returns whether the request waits."""
        below = match.below
        if any(active.request_id == request.request_id for active in self._active):
            return True
        if self._loads.is_for(request) and not self._is_late(request):
            return True
        if below is None or request.request_id in self._had:
            return False
        if below.refused:
            self.tier.counts.num_refused_restores += 1
            self._had[request.request_id] = None
            return False
        entries = _entries(below)
        if self.tier.disk is not None and any(isinstance(entry, DiskEntry) for entry in entries):
            self._deadlines.setdefault(request.request_id, time.monotonic() + (below.compute_s or FILES_S))
            if not self._is_late(request) and (self._loads.is_active or self._loads.begin(request, entries)):
                return True
            self._had[request.request_id] = None
            return False
        if self._is_full or any(not active.entries.isdisjoint(entries) for active in self._active):
            return True
        self.tier.pin(entries)  # making room on the device evicts entries of the host too
        lease = begin_lease(self._manager, match, below, request.num_tokens, num_running)
        if lease is None:
            self.tier.unpin(entries)
            return False
        self._had[request.request_id] = None
        restore = Restore(request.request_id, lease, below, set(entries), time.monotonic(), match.num_tokens)
        self._active.append(restore)
        self.tier.counts.num_restores += 1
        self._order_slices()
        return True

    @property
    def _is_full(self) -> bool:
        """Whether no further restore may begin now."""
        return self._num_outstanding >= self._max_slices or any(not active.is_complete for active in self._active)

    @property
    def _num_outstanding(self) -> int:
        """Number of slices that are ordered and not done."""
        return sum(len(active.outstanding) for active in self._active)

    def files_done(self, files: Collection[tuple[int, int, str]]) -> None:
        """Note the ends of file orders: number, bytes, and the reason of a failure."""
        if self._loads.files_done(files):
            self._wake()

    def ended(self, request: Request) -> None:
        """Forget a request that waits no more."""
        self._had.pop(request.request_id, None)
        self._loads.forget(request)
        self._deadlines.pop(request.request_id, None)
        self._blocked.discard(request.request_id)

    def admitted(self, request: Request, lease: Lease) -> CacheReport:
        """Count an admission. Returns its report, with what was restored for it."""
        counts, had = self.tier.counts, self._had.get(request.request_id)
        before = had.num_before if had is not None else lease.num_cached_tokens
        counts.num_external_query_tokens += max(0, len(lease.tokens) - before)
        hits = min(had.num_tokens, lease.num_cached_tokens) - before if had is not None else 0
        where = "disk" if self._loads.was_for(request) else "host memory"
        self.ended(request)
        if had is None or hits <= 0:
            return lease.report
        counts.num_external_hit_tokens += hits
        return lease.report.restored(hits, where, had.seconds)

    @property
    def num_blocked(self) -> int:
        """Number of waiting requests that cannot be admitted before a restore is done."""
        return len(self._blocked)

    # -- copies ----------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        return bool(self._active)

    @property
    def needs_steps(self) -> bool:
        """Whether steps without requests are worth launching, to move copies on."""
        return bool(self._active) or self._loads.is_active

    @property
    def has_unsaved(self) -> bool:
        """Whether something is on its way to a file."""
        disk = self.tier.disk
        return disk is not None and (self.tier.has_unstored or disk.is_saving or disk.has_orders)

    def take_file_orders(self) -> list[FileOrder]:
        """The file orders that the next step begins with."""
        return self.tier.disk.take_orders() if self.tier.disk is not None else []

    @property
    def num_missing_pages(self) -> int:
        """Number of pages that the restore in flight has yet to allocate."""
        active = self._active[-1] if self._active else None
        if active is None or active.is_complete:
            return 0
        return self._manager.spec.pages_for(active.below.num_tokens) - len(active.lease.pages)

    def take_orders(self) -> tuple[list[Transfer], list[Transfer], list[int]]:
        """The copies that the next step begins with: to the host, from the host; and the restores that are done."""
        if self._active:
            self._order_slices()
        orders, self._orders = self._orders, []
        confirmed, self._confirmed = self._confirmed, []
        return self.tier.take_stores(), orders, confirmed

    def _order_slices(self) -> None:
        """Order slices of the newest restore."""
        active = self._active[-1]
        while len(self._orders) < SLICES_PER_STEP and self._num_outstanding < self._max_slices:
            transfer = None if active.failed or active.is_complete else self._next_slice(active)
            if transfer is None:
                break
            self._orders.append(transfer)
        self._end_finished()

    def _next_slice(self, active: Restore) -> Transfer | None:
        """Allocate pages for the next slice. None if there are none now."""
        below, lease, size = active.below, active.lease, self._manager.spec.page_size
        entries = below.pages[active.num_ordered : active.num_ordered + self._slice_pages]
        is_last = active.num_ordered + len(entries) == len(below.pages)
        first = below.num_shared_tokens // size + active.num_ordered
        end = below.num_tokens if is_last else (first + len(entries)) * size
        is_state_only = below.num_shared_tokens == below.num_tokens
        if not is_state_only and self._manager.allocate(lease, end) is None:
            return None
        pages = list(zip([e.place for e in entries], lease.pages[first : first + len(entries)], strict=True))
        states = []
        if is_last and below.state is not None:
            ((_, slot),) = lease.checkpoints.stored
            has_tail = below.state.tail and not is_state_only
            states = [(below.state.place, slot, lease.pages[-1] if has_tail else 0)]
            entries = [*entries, below.state]
        after = max([entry.store for entry in entries], default=0)
        transfer = Transfer(self.tier.next_number(), pages, states, after)
        active.outstanding[transfer.number] = transfer, entries
        active.num_ordered += len(pages)
        active.is_complete = is_last
        if is_last:
            self.tier.touch(below)
        return transfer

    def give_up(self) -> bool:
        """Stop a restore that has yet to allocate pages, because running requests need pages. Returns whether its
        pages are free now. Copies in flight have to end first."""
        if self._active and not self._active[-1].is_complete:
            self._active[-1].failed = True
            self._end_finished()
        return not self._active

    def done(self, transfers: Collection[tuple[int, float]]) -> None:
        """Note copies that are done, with their seconds."""
        counts = self.tier.counts
        for number, seconds in transfers:
            active = next((active for active in self._active if number in active.outstanding), None)
            if active is None:
                self.tier.stored(number, seconds)
                continue
            transfer, entries = active.outstanding.pop(number)
            num_bytes = self.tier.num_bytes(transfer)
            self.tier.unpin(entries)
            self._confirmed.append(number)
            counts.restored_bytes += num_bytes
            counts.restored_seconds += seconds
            active.copy_seconds += seconds
            self.tier.costs.copied(num_bytes, seconds)
        self._end_finished()

    def computed(self, step: SchedulerOutput, seconds: float) -> None:
        """Note the time of a step, if it was mostly prefill."""
        prefills = [r for r in step.requests if not r.num_decode_tokens]
        if sum(r.num_tokens for r in prefills) > 4 * (len(step.requests) - len(prefills)):
            flops = self._manager.spec.prefill_flops
            self.tier.costs.computed(sum(flops(r.start, r.start + r.num_tokens) for r in prefills), seconds)

    def broke(self, step: SchedulerOutput) -> None:
        """Note a step that raised: its copies may not have run."""
        lost: set[Entry] = set()
        for transfer in step.stores:
            lost.update(self.tier.broke(transfer.number))
        if self._loads.broke(step):
            self._wake()
        for active in self._active:
            for number in active.outstanding.keys() & {transfer.number for transfer in step.restores}:
                self.tier.unpin(active.outstanding.pop(number)[1])
                active.failed = True
            active.failed |= not lost.isdisjoint(active.entries)
        self._end_finished()

    def _end_finished(self) -> None:
        """End the restores that have no copy in flight and none to order."""
        for active in [a for a in self._active if not a.outstanding and (a.is_complete or a.failed)]:
            self._active.remove(active)
            self._end(active)

    def _end(self, active: Restore) -> None:
        self._wake()
        self._manager.restored(active.lease, keep=not active.failed)
        self.tier.unpin(active.unordered)
        seconds = time.monotonic() - active.begun
        if active.failed:
            self.tier.counts.num_failed_restores += 1
            return
        self.tier.costs.restored(seconds, active.copy_seconds)
        if active.request_id in self._had:
            self._had[active.request_id] = Restored(active.num_before, active.below.num_tokens, seconds)

    def stats(self) -> dict[str, Any]:
        """Figures of the tier, as ``SchedulerStats`` names them."""
        return self.tier.stats()

    def check(self) -> None:
        """Assert the invariants."""
        self.tier.check()
        for active in self._active:
            read = [entry for _, entries in active.outstanding.values() for entry in entries]
            assert all(entry.pins for entry in [*read, *active.unordered]), "a restore reads unpinned memory"
        assert all(active.is_complete for active in self._active[:-1]), "two restores have slices to order"


def _entries(below: Below) -> list[Entry]:
    return [*below.pages, *([below.state] if below.state is not None else [])]
