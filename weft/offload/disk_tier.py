"""The disk tier: which entries a folder holds, the files to write, read and remove.

Job: an index of the folder's files by key, with bounds on bytes and age, and the orders for the thread that owns the
files. Owns: the index. Does not know: the content of files (``disk.py``), host memory, requests.

Entries of host memory are written to disk in the background, so that host memory evicts them at no cost. Writes beyond
the bound of the queue are dropped. Their entries stay in host memory only.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

from weft.cache.nodes import CheckpointKind
from weft.messages import FileOrder
from weft.offload import disk
from weft.offload.store import Entry

logger = logging.getLogger(__name__)

MAX_WAITING = 8192
"""Upper bound on files that wait to be written."""


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A file in the index. ``prefix``, ``tail`` and ``kind`` as in ``Entry``."""

    key: bytes
    name: str
    prefix: bytes = b""
    tail: int = 0
    kind: CheckpointKind = "end"


def entry_of(name: str) -> DiskEntry:
    """The entry that a file name describes. Raises ValueError for other names."""
    parts = name.split(".")
    if parts[-1] == "page" and len(parts) == 2:
        return DiskEntry(bytes.fromhex(parts[0]), name)
    if parts[-1] == "state" and len(parts) == 5 and parts[3] in get_args(CheckpointKind):
        kind = cast(CheckpointKind, parts[3])
        return DiskEntry(bytes.fromhex(parts[0]), name, bytes.fromhex(parts[1]), int(parts[2]), kind)
    raise ValueError(f"{name!r} is no name of a tier's file")


def name_of(entry: Entry) -> str:
    """The file name of an entry of host memory."""
    if not entry.prefix:
        return f"{entry.key.hex()}.page"
    return f"{entry.key.hex()}.{entry.prefix.hex()}.{entry.tail}.{entry.kind}.state"


@dataclass(slots=True)
class DiskCounts:
    """Events since the start."""

    num_disk_saves: int = 0
    num_disk_loads: int = 0
    num_rejected_files: int = 0
    num_failed_saves: int = 0
    num_disk_evictions: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0


class DiskTier:
    """The files of one engine in ``folder``.

    Args:
        fingerprint: of the engine. Files of others are not looked at.
        max_bytes, max_age_s: bounds. The least recently used files are removed first.
        num_ranks: number of ranks, each of which has a file of every entry. All sizes are those of rank 0.
    """

    def __init__(self, folder: Path, fingerprint: str, max_bytes: int, max_age_s: float, num_ranks: int = 1) -> None:
        self.counts = DiskCounts()
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._files: OrderedDict[bytes, tuple[DiskEntry, int, float]] = OrderedDict()
        self._tails: dict[bytes, dict[bytes, int]] = {}
        self._num_bytes = 0
        self._orders: list[FileOrder] = []
        self._saving: dict[int, Entry] = {}
        self._void: set[int] = set()
        self._number = 0
        disk.remove_torn(folder)
        shares = [folder / disk.share_of(fingerprint, rank, num_ranks) for rank in range(num_ranks)]
        first, *others = ({found.path.name: found for found in disk.files_of(share)} for share in shares)
        whole = set(first).intersection(*others)
        self._drop_parts(set().union(first, *others) - whole)
        for found in sorted((first[name] for name in whole), key=lambda found: found.used):
            try:
                self._add(entry_of(found.path.name), found.num_bytes, found.used)
            except ValueError:
                continue
        self._trim()

    def _drop_parts(self, names: set[str]) -> None:
        """Remove files whose entry some rank lacks, because the engine ended while its ranks wrote or removed them."""
        if names:
            logger.warning("disk tier: %d entries are removed, because a rank has no file of them", len(names))
        self.counts.num_rejected_files += len(names)
        for name in names:
            self._order("drop", name)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the index."""
        return self._num_bytes

    def stats(self) -> dict[str, int]:
        """Figures of the tier, as ``SchedulerStats`` names them."""
        return asdict(self.counts) | {"disk_bytes": self._num_bytes, "disk_max_bytes": self._max_bytes}

    def get(self, key: bytes) -> DiskEntry | None:
        found = self._files.get(key)
        return found[0] if found is not None else None

    def tails(self, prefix: bytes) -> set[int]:
        """Numbers of tokens after ``prefix`` at which states are stored."""
        return set(self._tails.get(prefix, {}).values())

    def _add(self, entry: DiskEntry, num_bytes: int, used: float) -> None:
        self._files[entry.key] = entry, num_bytes, used
        self._num_bytes += num_bytes
        if entry.prefix:
            self._tails.setdefault(entry.prefix, {})[entry.key] = entry.tail

    def _remove(self, key: bytes) -> DiskEntry:
        entry, num_bytes, _ = self._files.pop(key)
        self._num_bytes -= num_bytes
        if entry.prefix:
            tails = self._tails[entry.prefix]
            del tails[key]
            if not tails:
                del self._tails[entry.prefix]
        return entry

    def _trim(self) -> None:
        """Remove files beyond the bounds."""
        oldest_allowed = time.time() - self._max_age_s
        while self._files:
            key, (_, _, used) = next(iter(self._files.items()))
            if self._num_bytes <= self._max_bytes and used >= oldest_allowed:
                return
            self.drop(key)
            self.counts.num_disk_evictions += 1

    def drop(self, key: bytes) -> None:
        """Remove a file, also if it is being written."""
        self._void |= {number for number, entry in self._saving.items() if entry.key == key}
        if key in self._files:
            self._order("drop", self._remove(key).name)

    def clear(self) -> None:
        """Remove every file, also those that are being written."""
        self._void |= self._saving.keys()
        for key in list(self._files):
            self.drop(key)

    def _order(self, kind: str, name: str, place: int = 0, *, is_state: bool = False) -> int:
        self._number += 1
        self._orders.append(FileOrder(self._number, kind, name, place, is_state))
        return self._number

    def save(self, entry: Entry) -> bool:
        """Write an entry of host memory to a file, unless there is one. Returns whether its place has to stay."""
        if entry.key in self._files or len(self._saving) >= MAX_WAITING:
            return False
        self._saving[self._order("save", name_of(entry), entry.place, is_state=bool(entry.prefix))] = entry
        return True

    def load(self, entry: DiskEntry, place: int) -> int:
        """Read a file into a place of host memory. Returns the number of the order."""
        _, num_bytes, _ = self._files[entry.key]
        self._files[entry.key] = entry, num_bytes, time.time()
        self._files.move_to_end(entry.key)
        return self._order("load", entry.name, place, is_state=bool(entry.prefix))

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    @property
    def is_saving(self) -> bool:
        """Whether files are still to be written."""
        return bool(self._saving)

    def take_orders(self) -> list[FileOrder]:
        """The orders that the next step begins with."""
        orders, self._orders = self._orders, []
        return orders

    def saved(self, number: int, num_bytes: int, reason: str) -> Entry | None:
        """Note the end of a save. Returns the entry, whose place may be used again; None if the number is no save."""
        entry = self._saving.pop(number, None)
        if number in self._void:
            self._void.discard(number)
            if entry is not None and not reason:
                self._order("drop", name_of(entry))
        elif entry is not None and reason:
            if not self.counts.num_failed_saves:
                logger.warning("host tier: a file cannot be written, further failures are counted only: %s", reason)
            self.counts.num_failed_saves += 1
            if entry.key not in self._files:  # other ranks may have written theirs
                self._order("drop", name_of(entry))
        elif entry is not None and entry.key not in self._files:
            self.counts.num_disk_saves += 1
            self.counts.saved_bytes += num_bytes
            self._add(entry_of(name_of(entry)), num_bytes, time.time())
            self._trim()
        return entry

    def rejected(self, entry: DiskEntry, reason: str) -> None:
        """Note that a file must not be used."""
        logger.warning("host tier: file %s is rejected: %s", entry.name, reason)
        self.counts.num_rejected_files += 1
        self.drop(entry.key)
