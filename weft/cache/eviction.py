"""Eviction of KV pages from the leaves upwards, and of states anywhere in the tree.

Job: find the least useful evictable KV tail or state quickly, and evict it. Owns: two lazy heaps and the counters. Does
not know: who needs the room, how utilities are computed (``policy``), or the shape of the tree above its leaves.

KV of a leaf is evicted from its tail, back to the last state inside it, or by fewer pages if fewer are needed. A state
that is evicted alone leaves its KV (a tombstone). Evicted KV takes its states along.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from weft.cache.nodes import Checkpoint, Node
from weft.cache.policy import EvictionPolicy, ReuseOdds
from weft.cache.pools import PagePool, StatePool
from weft.cache.radix_tree import RadixTree
from weft.cache.spec import CacheSpec
from weft.cache.tier import Tier

Item = TypeVar("Item", Node, Checkpoint)

REBUILD_INTERVAL = 256
"""Minimum number of evictions between two rebuilds of the heaps, since reuse odds fall without a push. A large tree
waits for as many evictions as it has states, so the cost per eviction does not depend on its size."""


class LazyHeap(Generic[Item]):
    """Items by utility, smallest first. Entries may be outdated. An item is pushed again whenever it may have become
    evictable or less useful, and its utility is computed again when it is popped.

    Args:
        utility: computes the item's utility; None if it cannot be evicted.
    """

    def __init__(self, utility: Callable[[Item], float | None]) -> None:
        self._utility: Callable[[Item], float | None] = utility
        self._heap: list[tuple[float, int, Item]] = []
        self._numbers = itertools.count()
        self._compact_at = 1024

    def push(self, item: Item) -> None:
        utility = self._utility(item)
        if utility is not None:
            heapq.heappush(self._heap, (utility, next(self._numbers), item))
            if len(self._heap) > self._compact_at:
                self.rebuild()

    def pop(self) -> Item | None:
        """Remove and return the least useful evictable item."""
        while self._heap:
            entered, _, item = heapq.heappop(self._heap)
            utility = self._utility(item)
            if utility is None:
                continue
            if utility > entered:
                heapq.heappush(self._heap, (utility, next(self._numbers), item))
                continue
            return item
        return None

    def rebuild(self) -> None:
        """Compute every utility again and drop outdated entries."""
        items = {id(item): item for _, _, item in self._heap}.values()
        fresh = [(utility, next(self._numbers), item) for item in items if (utility := self._utility(item)) is not None]
        heapq.heapify(fresh)
        self._heap = fresh
        self._compact_at = 2 * len(fresh) + 1024


class Evictor:
    """Evicts from one tree into its pools. It is the watcher of the tree. ``tier``: is offered what is evicted."""

    def __init__(
        self, spec: CacheSpec, tree: RadixTree, pages: PagePool, slots: StatePool, policy: EvictionPolicy
    ) -> None:
        self.policy = policy
        self.tier: Tier | None = None
        self.num_evicted_pages = 0
        self.num_evicted_states = 0
        self._spec = spec
        self._needs_state = spec.has_states
        self._tree = tree
        self._pages = pages
        self._slots = slots
        self._leaves: LazyHeap[Node] = LazyHeap(self._leaf_utility)
        self._states: LazyHeap[Checkpoint] = LazyHeap(self._state_utility)
        self._epoch = policy.epoch
        self.odds = ReuseOdds()
        self._until_rebuild = REBUILD_INTERVAL
        tree.watcher = self

    def offer_leaf(self, node: Node) -> None:
        self._leaves.push(node)

    def offer_state(self, checkpoint: Checkpoint) -> None:
        self._states.push(checkpoint)
        if checkpoint.node.is_evictable_leaf:
            self._leaves.push(checkpoint.node)

    @property
    def num_evictable_slots(self) -> int:
        return self._tree.num_checkpoints - self._tree.num_pinned_checkpoints

    def make_room(self, count: int) -> bool:
        """Evict KV until ``count`` pages are free. Returns False, and evicts nothing, if that is impossible."""
        if count > self._pages.num_free + self._pages.num_evictable:
            return False
        while self._pages.num_free < count:
            self._follow_policy()
            leaf = self._leaves.pop()
            assert leaf is not None, "evictable pages without an evictable leaf"
            self._evict_tail(leaf, count - self._pages.num_free)
        return True

    def take_pages(self, count: int) -> list[int] | None:
        """Return ``count`` free pages, after evicting KV if need be. None, with no page taken, if there are too few."""
        return self._pages.allocate(count) if self.make_room(count) else None

    def take_slot(self) -> int | None:
        """Return a free slot, or the slot of the least useful state after evicting it; None if there is neither."""
        slot = self._slots.allocate()
        if slot is not None or not self.num_evictable_slots:
            return slot
        self._follow_policy()
        checkpoint = self._states.pop()
        assert checkpoint is not None, "evictable states are miscounted"
        self.policy.observe_eviction(self._tree.clock - checkpoint.last_used)
        self.num_evicted_states += 1
        if self.tier is not None:
            self.tier.state_leaves(checkpoint)
        # The slot changes its owner without passing through the pool.
        return self._tree.take_checkpoint(checkpoint, lost=True)

    def _evict_tail(self, leaf: Node, pages_needed: int) -> None:
        inner = max((p for p in leaf.checkpoints if p < leaf.end), default=leaf.start)
        last_page = (leaf.end - 1) // self._spec.page_size
        by_pages = (last_page - pages_needed + 1) * self._spec.page_size
        self.policy.observe_eviction(self._tree.clock - leaf.last_used)
        free_before, states_before = self._pages.num_free, self._tree.num_checkpoints
        if self.tier is not None:
            self._offer_tail(self.tier, leaf, max(inner, by_pages))
        self._tree.trim(leaf, max(inner, by_pages))
        self.num_evicted_pages += self._pages.num_free - free_before
        self.num_evicted_states += states_before - self._tree.num_checkpoints

    def _offer_tail(self, tier: Tier, leaf: Node, end: int) -> None:
        tier.kv_leaves(leaf, end)
        for position, checkpoint in leaf.checkpoints.items():
            if position > end:
                tier.state_leaves(checkpoint)

    def _follow_policy(self) -> None:
        self._until_rebuild -= 1
        if self._epoch != self.policy.epoch or self._until_rebuild <= 0:
            self._until_rebuild = max(REBUILD_INTERVAL, self._tree.num_checkpoints)
            self._epoch = self.policy.epoch
            self._leaves.rebuild()
            self._states.rebuild()

    def _state_utility(self, checkpoint: Checkpoint) -> float | None:
        if not checkpoint.attached or checkpoint.pins:
            return None
        return self.policy.state_utility(checkpoint.last_used, self._state_flops(checkpoint))

    def _state_flops(self, checkpoint: Checkpoint) -> float:
        """FLOPs from the nearest surviving ancestor state to this one, times the odds of a reuse."""
        flops = self._spec.prefill_flops(_state_before(checkpoint.node, checkpoint.position), checkpoint.position)
        return flops * self.odds(checkpoint.kind, checkpoint.lineage, checkpoint.num_uses)

    def _leaf_utility(self, leaf: Node) -> float | None:
        if not leaf.is_evictable_leaf:
            return None
        if not self._needs_state:
            return self.policy.kv_utility(leaf.last_used, self._spec.prefill_flops(leaf.end - 1, leaf.end))
        checkpoint = leaf.checkpoints.get(leaf.end)
        if checkpoint is None:  # without a state, a reuse would have to compute this KV again
            return self.policy.kv_utility(leaf.last_used, 0.0)
        inner = max((p for p in leaf.checkpoints if p < leaf.end), default=leaf.start)
        last_used = max(leaf.last_used, checkpoint.last_used)
        return self.policy.kv_utility(last_used, self._state_flops(checkpoint) / (leaf.end - inner))


def _state_before(node: Node, position: int) -> int:
    """Position of the last state before ``position`` on the path of ``node``; 0 if there is none."""
    for each in node.path():
        best = max((p for p in each.checkpoints if p < position), default=0)
        if best:
            return best
    return 0
