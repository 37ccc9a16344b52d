"""The host tier: the prefixes in host memory, the copies to it, and the entries that a restore reads.

Job: keep KV pages and recurrent states that leave the device, find prefixes that can be restored, order the copies.
Owns: the places in host memory, their index, the copies that are ordered and not sent yet. Does not know: tensors,
requests, when a restore begins (``restores.py``).

Pages and states are independent entries under chained keys, so a page can be there without the pages before it. A
lookup starts at the end of what the device has, and counts a position only if all KV up to it and the state at exactly
this position are there. A state's entry also holds the KV of the partial page at its position::

    tokens     0        16        32        48  53
    device     |== page ==|== page ==|                evicted from the end
    host                            |== page ==|      key of 48 tokens
    host                                       |==| + state after 53 tokens

The least recently used entry is evicted first. A use touches a prefix from its end to its begin, so prefixes lose
their end first.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

from msgspec.structs import replace

from weft.cache.nodes import Checkpoint, Node, Prefix, Tokens
from weft.cache.spec import CacheSpec
from weft.cache.tier import Below
from weft.messages import Transfer
from weft.offload.costs import RestoreCosts
from weft.offload.disk_tier import DiskEntry, DiskTier
from weft.offload.index import TierIndex
from weft.offload.keys import KEYS_AHEAD, PageKeys, SequenceKeys
from weft.offload.store import Entry, HostStore

WritePolicy = Literal["write_back", "write_through_selective"]


@dataclass(slots=True)
class TierCounts:
    """Events since the start. Bytes are those of one rank."""

    num_external_query_tokens: int = 0
    num_external_hit_tokens: int = 0
    num_restores: int = 0
    num_refused_restores: int = 0
    num_failed_restores: int = 0
    stored_bytes: int = 0
    stored_seconds: float = 0.0
    restored_bytes: int = 0
    restored_seconds: float = 0.0


@dataclass(slots=True)
class _Orders:
    """Copies to host memory that the next step begins with."""

    number: int = 0
    pages: list[tuple[int, int]] = field(default_factory=list)
    states: list[tuple[int, int, int]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


class HostTier:
    """The tier of one engine; ``cache/tier.py`` has the contract of its methods.

    Args:
        spec: of the caches of one rank.
        num_pages, num_slots: places in host memory.
        fingerprint: everything that decides what the bytes of a page or state mean.
        policy: when entries are copied: when they leave the device, or once a request has reused them.
        page_budget: most pages that a step copies because requests reused them.
        disk: a tier below this one.

    Attributes:
        keys_left: keys that lookups may compute before the next step. Without one left a lookup is pending.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_pages: int,
        num_slots: int,
        fingerprint: str,
        policy: WritePolicy = "write_back",
        page_budget: int = 64,
        disk: DiskTier | None = None,
    ) -> None:
        self.disk = disk
        self.pages, self.states = HostStore(num_pages), HostStore(num_slots)
        self.index = TierIndex(spec, self.pages, self.states, disk)
        self.costs, self.counts = RestoreCosts(), TierCounts()
        self.policy: WritePolicy = policy
        self._spec, self._size, self._budget = spec, spec.page_size, page_budget
        self._page_bytes, self._slot_bytes = spec.page_bytes, spec.slot_bytes  # sums over layers
        self.keys = PageKeys(fingerprint, spec.page_size)
        self.keys_left: float = inf
        self._orders = _Orders()
        self._sent: dict[int, list[Entry]] = {}
        self._to_copy: deque[tuple[Node, int]] = deque()
        self._number = 0

    # -- what leaves the device, or is reused there ----------------------------------------------------------------

    def kv_leaves(self, leaf: Node, end: int) -> None:
        if self.policy == "write_back":
            first = end // self._size
            self._store_pages(leaf, range(leaf.end // self._size - 1, first - 1, -1))

    def state_leaves(self, checkpoint: Checkpoint) -> None:
        if self.policy == "write_back":
            self._store_state(checkpoint)

    def reused(self, node: Node, num_tokens: int, checkpoint: Checkpoint | None) -> None:
        if self.policy == "write_through_selective":
            self._to_copy.append((node, num_tokens))
            if checkpoint is not None:
                self._store_state(checkpoint)

    def _store_pages(self, node: Node, pages: Iterable[int]) -> None:
        """Copy whole pages that end inside the node's span, given by their place in the sequence."""
        keys, first = self.keys.of_node(node), node.start // self._size
        for page in pages:
            key = keys[page - first]
            if self.pages.get(key) is not None:
                self.pages.touch(key)
            elif (entry := self.pages.add(key)) is not None:
                self._orders.pages.append((node.pages[page - first], entry.place))
                self._order(entry)

    def _store_state(self, checkpoint: Checkpoint) -> None:
        node, position = checkpoint.node, checkpoint.position
        count, tail = divmod(position, self._size)
        prefix, key = self.keys.of_state(node, position)
        if self.states.get(key) is not None:
            self.states.touch(key)
        elif (entry := self.states.add(key, prefix, tail, checkpoint.kind)) is not None:
            page = node.pages[count - node.start // self._size] if tail and self._page_bytes else 0
            self._orders.states.append((checkpoint.slot, entry.place, page))
            self._order(entry)

    def _order(self, entry: Entry) -> None:
        orders = self._orders
        orders.number = orders.number or self.next_number()
        self.pin([entry])
        entry.store = orders.number
        orders.entries.append(entry)

    def _copy_reused(self) -> None:
        """Order copies of reused pages, as many as a step may have. Nodes that were evicted meanwhile are skipped."""
        left = self._budget
        while self._to_copy and left > 0:
            node, num_tokens = self._to_copy[0]
            for each in reversed(list(node.path())) if node.attached else ():
                pages = range(each.start // self._size, min(each.end, num_tokens) // self._size)
                keys = self.keys.of_node(each)
                new = [page for page in pages if self.pages.get(keys[page - pages.start]) is None][:left]
                self._store_pages(each, new)
                left -= len(new)
            if left > 0:
                self._to_copy.popleft()

    # -- what is found ---------------------------------------------------------------------------------------------

    def look_up(self, tokens: Tokens, salt: str | None, prefix: Prefix, num_tokens: int) -> Below | None:
        if not (self.pages or self.states or self.disk) or num_tokens >= len(tokens) - 1:
            return None
        first = num_tokens // self._size
        keys = self.keys.of_sequence(tokens, salt, prefix.node, first)
        if not self._prepare(keys, prefix.num_tokens // self._size):
            return Below(num_tokens, num_tokens, [], is_pending=True)
        found = self.index.longest(keys, prefix.num_tokens, num_tokens)
        if found is None:
            return None
        flops = self._spec.prefill_flops(num_tokens, found.num_tokens)
        refused = self.costs.refusal(found.num_bytes, flops, self._bytes_on_disk(found))
        return replace(found, refused=refused, compute_s=self.costs.seconds_to_compute(flops))

    def _bytes_on_disk(self, below: Below) -> int:
        if self.disk is None:
            return 0
        return sum(self._bytes_of(entry) for entry in (*below.pages, below.state) if isinstance(entry, DiskEntry))

    def _prepare(self, keys: SequenceKeys, shared: int) -> bool:
        """Compute the keys that a lookup needs, as many as this step may. Returns whether they are all there. A lookup
        ends at the first page after ``shared`` that is missing."""
        while (known := keys.num_known) < keys.num_pages:
            if known > shared and self._page_bytes and self.index.page(keys[known]) is None:
                return True
            if self.keys_left <= 0:
                return False
            count = min(KEYS_AHEAD, keys.num_pages - known)
            keys.extend(known + count)
            self.keys_left -= count
        return True

    def held(self, node: Node) -> tuple[int, list[int]]:
        if node.parent is None:
            return 0, []
        positions = sorted({*node.checkpoints, *node.lost_states})
        states = [position for position in positions if self.index.state(self.keys.of_state(node, position)[1])]
        return sum(map(self.index.has, self.keys.of_node(node))), states

    def _bytes_of(self, entry: Entry | DiskEntry) -> int:
        return self._slot_bytes if entry.prefix else self._page_bytes

    def touch(self, below: Below) -> None:
        """Note a use of a found prefix, from its end to its begin."""
        self.pages.touch_held(reversed(below.pages))
        if below.state is not None:
            self.states.touch_held([below.state])

    # -- copies ----------------------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether something is to be copied to the host."""
        return bool(self._orders.entries or self._to_copy)

    def take_stores(self) -> list[Transfer]:
        """The copies to the host that the next step begins with."""
        if self._to_copy:
            self._copy_reused()
        orders = self._orders
        if not orders.entries:
            return []
        self._orders = _Orders()
        self.unpin(orders.entries)
        self._sent[orders.number] = orders.entries
        return [Transfer(orders.number, orders.pages, orders.states)]

    def next_number(self) -> int:
        """The number of the next copy."""
        self._number += 1
        return self._number

    def num_bytes(self, transfer: Transfer) -> int:
        """Bytes that a copy moves."""
        return len(transfer.pages) * self._page_bytes + len(transfer.states) * self._slot_bytes

    def stored(self, number: int, seconds: float) -> None:
        """Note that a copy to the host is done."""
        for entry in self._sent.pop(number, ()):
            entry.store = 0
            self.counts.stored_bytes += self._bytes_of(entry)
            if self.disk is not None and self._store_of(entry).holds(entry) and self.disk.save(entry):
                self.pin([entry])
        self.counts.stored_seconds += seconds

    def broke(self, number: int) -> list[Entry]:
        """Drop the entries of a copy to the host that may not have run. Returns them."""
        lost = self._sent.pop(number, [])
        for entry in lost:
            if self._store_of(entry).holds(entry):
                self._store_of(entry).drop(entry)
        return lost

    @property
    def has_unstored(self) -> bool:
        """Whether copies to the host are ordered, or on their way."""
        return self.has_orders or bool(self._sent)

    def add_loading(self, file: DiskEntry) -> Entry | None:
        """Make an entry of host memory that a file will fill. None if there is no place, or an entry already."""
        store = self.states if file.prefix else self.pages
        if store.get(file.key) is not None:
            return None
        entry = store.add(file.key, file.prefix, file.tail, file.kind)
        if entry is not None:
            entry.is_loading = True
            self.pin([entry])
        return entry

    def end_loading(self, entry: Entry, *, keep: bool) -> None:
        """Note that a file was read, or rejected."""
        store = self._store_of(entry)
        entry.is_loading = False
        if not keep and store.holds(entry):
            store.drop(entry)
        store.unpin([entry])

    def abandon(self, entry: Entry) -> None:
        """Drop an entry that is loading. Its place is busy until it is unpinned."""
        if self._store_of(entry).holds(entry):
            self._store_of(entry).drop(entry)

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep the places of entries that a restore reads."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Collection[Entry]) -> None:
        """Note that a copy of each entry is done."""
        self.pages.unpin(entry for entry in entries if not entry.prefix)
        self.states.unpin(entry for entry in entries if entry.prefix)

    def _store_of(self, entry: Entry) -> HostStore:
        return self.states if entry.prefix else self.pages

    # -- what is not kept ------------------------------------------------------------------------------------------

    def forget(self, tokens: Tokens, salt: str | None) -> None:
        keys = SequenceKeys(tokens, salt, 0, self.keys.root(salt), self._size)
        for count in range(len(tokens) // self._size + 1):
            self._forget(self.pages, keys[count])
            for tail in self.index.tails(keys[count]):
                if count * self._size + tail <= len(tokens):
                    self._forget(self.states, keys.state(count, tail))

    def _forget(self, store: HostStore, key: bytes) -> None:
        entry = store.get(key)
        if entry is not None:
            store.drop(entry)
        if self.disk is not None:
            self.disk.drop(key)

    def clear(self) -> None:
        self._to_copy.clear()
        self.pages.clear()
        self.states.clear()
        self.unpin(self._orders.entries)
        self._orders = _Orders()
        if self.disk is not None:
            self.disk.clear()

    def stats(self) -> dict[str, Any]:
        """Figures of the tier, as ``SchedulerStats`` names them."""
        return (
            asdict(self.counts)
            | (self.disk.stats() if self.disk is not None else {})
            | {
                "host_pages": self.pages.capacity,
                "host_states": self.states.capacity,
                "host_pages_in_use": len(self.pages),
                "host_states_in_use": len(self.states),
                "num_host_evicted_pages": self.pages.num_evicted,
                "num_host_evicted_states": self.states.num_evicted,
            }
        )

    def check(self) -> None:
        """Assert the invariants of both pools."""
        self.pages.check()
        self.states.check()
        assert all(entry.pins for entry in self._orders.entries), "an ordered copy has no pin"
