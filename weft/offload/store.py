"""A pool of host memory and the index of its content: one entry per key, the least recently used evicted first.

Does not know: tokens, tensors, what an entry holds.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from weft.cache.nodes import CheckpointKind


@dataclass(slots=True, eq=False)
class Entry:
    """Content under a key.

    Attributes:
        key: what the content is.
        place: index in the pool.
        store: number of the copy that fills the place.
        pins: copies that read or fill the place and are not done. A pinned entry is never evicted, and the place of a
            dropped one is free only after its last copy.
        prefix, tail: of a state, the key of its whole pages, and the number of tokens after them.
        kind: of a state, the reason why it was stored.
        is_loading: its content comes from a file and is not there yet.
    """

    key: bytes
    place: int
    store: int = 0
    pins: int = 0
    prefix: bytes = b""
    tail: int = 0
    kind: CheckpointKind = "end"
    is_loading: bool = False


class HostStore:
    """``capacity`` places of one kind."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_evicted = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._busy: dict[int, Entry] = {}
        self._tails: dict[bytes, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key. Changes nothing."""
        return self._entries.get(key)

    def tails(self, prefix: bytes) -> list[int]:
        """Numbers of tokens after ``prefix`` at which states are stored, ascending."""
        tails = self._tails.get(prefix)
        return sorted(tails) if tails else []

    def touch(self, key: bytes) -> None:
        """Note a use of an entry."""
        self._entries.move_to_end(key)

    def touch_held(self, entries: Iterable[Entry]) -> None:
        """Note a use of entries, of those that were neither evicted nor dropped."""
        held, move = self._entries, self._entries.move_to_end
        for entry in entries:
            if held.get(entry.key) is entry:
                move(entry.key)

    def add(self, key: bytes, prefix: bytes = b"", tail: int = 0, kind: CheckpointKind = "end") -> Entry | None:
        """Make an entry, evicting another one if no place is free. Returns None if every entry is pinned, or if there
        are no places."""
        assert key not in self._entries, "the key has an entry already"
        if not self._free and not self._evict():
            return None
        entry = Entry(key, self._free.pop(), prefix=prefix, tail=tail, kind=kind)
        self._entries[key] = entry
        if prefix:
            tails = self._tails.setdefault(prefix, {})
            tails[tail] = tails.get(tail, 0) + 1
        return entry

    def _evict(self) -> bool:
        oldest = next((entry for entry in self._entries.values() if not entry.pins), None)
        if oldest is not None:
            self.num_evicted += 1
            self.drop(oldest)
        return oldest is not None

    def drop(self, entry: Entry) -> None:
        """Remove an entry. Its place is free as soon as no copy reads or fills it."""
        del self._entries[entry.key]
        if entry.pins:
            self._busy[entry.place] = entry
        else:
            self._free.append(entry.place)
        if entry.prefix:
            tails = self._tails[entry.prefix]
            tails[entry.tail] -= 1
            if not tails[entry.tail]:
                del tails[entry.tail]
            if not tails:
                del self._tails[entry.prefix]

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Note that one copy of each entry is done."""
        busy = self._busy
        for entry in entries:
            entry.pins -= 1
            assert entry.pins >= 0, "an entry is unpinned more often than it was pinned"
            if busy and not entry.pins and busy.get(entry.place) is entry:
                del busy[entry.place]
                self._free.append(entry.place)

    def holds(self, entry: Entry) -> bool:
        """Whether the entry was neither evicted nor dropped."""
        return self._entries.get(entry.key) is entry

    def clear(self) -> None:
        for entry in list(self._entries.values()):
            self.drop(entry)

    def entries(self) -> list[Entry]:
        """All entries, the least recently used first."""
        return list(self._entries.values())

    def check(self) -> None:
        """Assert that every place is free or has one entry, and that the states of a prefix are counted right."""
        places = [entry.place for entry in self._entries.values()] + self._free + list(self._busy)
        assert sorted(places) == list(range(self.capacity)), "a place has two owners, or none"
        tails: dict[bytes, dict[int, int]] = {}
        for key, entry in self._entries.items():
            assert entry.key == key and entry.pins >= 0
            if entry.prefix:
                of_prefix = tails.setdefault(entry.prefix, {})
                of_prefix[entry.tail] = of_prefix.get(entry.tail, 0) + 1
        assert all(entry.pins > 0 for entry in self._busy.values()), "a place without copies is not free"
        assert tails == self._tails, "states are miscounted"
