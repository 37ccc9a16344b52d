"""Loads: the files of a prefix come into host memory, from where a restore takes them.

Job: order the reads of one prefix at a time, and note the ends of all file orders. Owns: the load in flight, and the
places that it fills. Does not know: the device, and when a request gets a restore (``restores.py``).
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from weft.messages import SchedulerOutput
from weft.offload.disk_tier import DiskEntry
from weft.offload.store import Entry
from weft.offload.tier import HostTier
from weft.request import Request


@dataclass(slots=True, eq=False)
class Load:
    """Files on their way to host memory.

    Attributes:
        request_id: the request that needs them.
        begun: time of the begin.
        pinned: entries of the prefix that are in host memory already.
        waiting: number of the order -> the file, and the place that it fills.
    """

    request_id: str
    begun: float
    pinned: list[Entry]
    waiting: dict[int, tuple[DiskEntry, Entry]] = field(default_factory=dict)
    num_bytes: int = 0


class Loads:
    """Loads of one scheduler. A request gets one load per admission."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._load: Load | None = None
        self._loaded: set[str] = set()
        self._orphans: dict[int, Entry] = {}  # places that a thread may still fill for a step that broke

    @property
    def is_active(self) -> bool:
        return self._load is not None

    def is_for(self, request: Request) -> bool:
        """Whether the load in flight is for a request."""
        return self._load is not None and self._load.request_id == request.request_id

    def was_for(self, request: Request) -> bool:
        """Whether a request had its load, or has it now."""
        return request.request_id in self._loaded

    def forget(self, request: Request) -> None:
        """Forget a request that waits no more."""
        self._loaded.discard(request.request_id)

    def begin(self, request: Request, entries: Sequence[Entry | DiskEntry]) -> bool:
        """Read the files among the entries of a prefix into host memory. Returns False, and reads none, if it has no
        room for them, or if the request had its load."""
        tier = self._tier
        assert tier.disk is not None
        if request.request_id in self._loaded:
            return False
        self._loaded.add(request.request_id)
        load = Load(request.request_id, time.monotonic(), [entry for entry in entries if isinstance(entry, Entry)])
        tier.pin(load.pinned)
        added: list[tuple[DiskEntry, Entry]] = []
        for file in entries:
            if isinstance(file, DiskEntry) and (entry := tier.add_loading(file)) is not None:
                added.append((file, entry))
        if len(load.pinned) + len(added) < len(entries):
            tier.unpin(load.pinned)
            for _, entry in added:
                tier.end_loading(entry, keep=False)
            return False
        load.waiting = {tier.disk.load(file, entry.place): (file, entry) for file, entry in added}
        self._load = load
        return True

    def files_done(self, files: Collection[tuple[int, int, str]]) -> bool:
        """Note the ends of file orders: number, bytes, and the reason of a failure. Returns whether the load in flight
        has ended."""
        tier, load = self._tier, self._load
        assert tier.disk is not None
        for number, num_bytes, reason in files:
            saved = tier.disk.saved(number, num_bytes, reason)
            if saved is not None:
                tier.unpin([saved])
            elif number in self._orphans:
                tier.unpin([self._orphans.pop(number)])
            elif load is not None and number in load.waiting:
                file, entry = load.waiting.pop(number)
                tier.end_loading(entry, keep=not reason)
                if reason:
                    tier.disk.rejected(file, reason)
                else:
                    tier.disk.counts.num_disk_loads += 1
                    tier.disk.counts.loaded_bytes += num_bytes
                    load.num_bytes += num_bytes
        if load is None or load.waiting:
            return False
        tier.costs.loaded(load.num_bytes, time.monotonic() - load.begun)
        self._end(load)
        return True

    def broke(self, step: SchedulerOutput) -> bool:
        """Note a step that raised: its reads may not have run. Returns whether the load in flight has ended."""
        load = self._load
        if load is None:
            return False
        for order in step.files:
            if (waiting := load.waiting.pop(order.number, None)) is not None:
                self._orphans[order.number] = waiting[1]
                self._tier.abandon(waiting[1])
        if load.waiting:
            return False
        self._end(load)
        return True

    def _end(self, load: Load) -> None:
        self._load = None
        self._tier.unpin(load.pinned)
