"""The index of a tier: what host memory and files hold under a key, and the longest prefix of a sequence among them.

Job: look up, without changing anything. Does not know: copies, costs, requests.
"""

from itertools import islice

from weft.cache.spec import CacheSpec
from weft.cache.tier import Below
from weft.offload.disk_tier import DiskEntry, DiskTier
from weft.offload.keys import SequenceKeys
from weft.offload.store import Entry, HostStore


class TierIndex:
    """The index of the entries of a tier. An entry of host memory goes before the file of the same key."""

    def __init__(self, spec: CacheSpec, pages: HostStore, states: HostStore, disk: DiskTier | None) -> None:
        self._pages, self._states, self.disk = pages, states, disk
        self._size, self._has_states = spec.page_size, spec.has_states
        self._page_bytes, self._slot_bytes = spec.page_bytes, spec.slot_bytes

    def has(self, key: bytes) -> bool:
        """Whether a page or a state is in host memory or in a file."""
        return (self.state(key) if self._states.get(key) is not None else self.page(key)) is not None

    def page(self, key: bytes) -> Entry | DiskEntry | None:
        return self._entry(self._pages, key)

    def state(self, key: bytes) -> Entry | DiskEntry | None:
        return self._entry(self._states, key)

    def _entry(self, store: HostStore, key: bytes) -> Entry | DiskEntry | None:
        """An entry of host memory, or else of the disk."""
        entry = store.get(key)
        if entry is not None:
            return None if entry.is_loading else entry
        return self.disk.get(key) if self.disk is not None else None

    def tails(self, prefix: bytes) -> list[int]:
        """Numbers of tokens after the whole pages of ``prefix`` at which states are stored, ascending."""
        tails = self._states.tails(prefix)
        return tails if self.disk is None else sorted({*tails, *self.disk.tails(prefix)})

    def longest(self, keys: SequenceKeys, kv: int, num_tokens: int) -> Below | None:
        """The longest prefix that a restore could bring; None if it has no more than ``num_tokens`` tokens.

        Args:
            kv: leading tokens whose KV is on the device.
        """
        find = self._longest_with_state if self._has_states else self._longest_kv
        return find(keys, kv, num_tokens)

    def _longest_kv(self, keys: SequenceKeys, kv: int, num_tokens: int) -> Below | None:
        """The longest run of whole pages, for models without states."""
        shared = kv // self._size
        pages = self._pages_from(keys, shared, len(keys.tokens) // self._size)
        end = (shared + len(pages)) * self._size
        if min(end, len(keys.tokens) - 1) <= num_tokens:
            return None
        return Below(end, shared * self._size, pages, num_bytes=len(pages) * self._page_bytes)

    def _pages_from(self, keys: SequenceKeys, first: int, end: int) -> list[Entry | DiskEntry]:
        """The entries of pages ``first``, ``first + 1``, … up to the first one that is missing."""
        entries: list[Entry | DiskEntry] = []
        get = self._pages.get
        for key in islice(keys.after(first), max(0, end - first)):
            held = get(key)
            entry = self.page(key) if held is None or held.is_loading else held
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _longest_with_state(self, keys: SequenceKeys, kv: int, num_tokens: int) -> Below | None:
        """The last position that has a state, and all KV before it. One token is left to compute."""
        size, limit = self._size, len(keys.tokens) - 1
        shared, last = kv // size, limit // size
        pages: list[Entry | DiskEntry] = []
        if self._page_bytes:
            pages = self._pages_from(keys, shared, last)
            last = shared + len(pages)
        found = self._last_state(keys, num_tokens, min(limit, (last + 1) * size - 1))
        if found is None:
            return None
        position, state = found
        if position <= kv:
            return Below(position, position, [], state, state.kind, self._slot_bytes)
        pages = pages[: position // size - shared]
        num_bytes = len(pages) * self._page_bytes + self._slot_bytes
        return Below(position, shared * size, pages, state, state.kind, num_bytes)

    def _last_state(self, keys: SequenceKeys, after: int, limit: int) -> tuple[int, Entry | DiskEntry] | None:
        """The last position from ``after + 1`` to ``limit`` whose state is there, and the state."""
        for count in range(limit // self._size, after // self._size - 1, -1):
            for tail in reversed(self.tails(keys[count])):
                position = count * self._size + tail
                if after < position <= limit and (state := self.state(keys.state(count, tail))):
                    return position, state
        return None
