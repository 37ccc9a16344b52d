"""The start of a lease: what a request gets of the tree and of the pools when it is admitted.

Job: lock the matched prefix, take a working slot and the page for a copy, order both copies, plan the states to store.
Does not know: which leases there are (``manager.py``).
"""

from collections.abc import Sequence

from weft.cache.eviction import Evictor
from weft.cache.lease import Lease
from weft.cache.match import Match, explain
from weft.cache.nodes import Checkpoint, Node, Prefix
from weft.cache.pools import PagePool
from weft.cache.radix_tree import RadixTree
from weft.cache.spec import CacheSpec
from weft.cache.state_plan import StatePlan


class Leasing:
    """Starts leases over one tree. ``keeps``: results are inserted into the tree, so that prefixes are locked."""

    def __init__(
        self, spec: CacheSpec, tree: RadixTree, evictor: Evictor, pages: PagePool, states: StatePlan, keeps: bool
    ) -> None:
        self.spec, self.tree, self.evictor, self.pages, self.states = spec, tree, evictor, pages, states
        self._keeps, self._needs_state = keeps, spec.has_states

    def start(
        self, match: Match, num_tokens: int, reserve_pages: int, num_prompt_tokens: int, boundaries: Sequence[int]
    ) -> Lease | None:
        """Start a lease; see ``Manager.lease``. None, with nothing changed, if pages or slots do not suffice."""
        report = explain(match, needs_state=self._needs_state)
        node = self.lock_prefix(match)
        num_shared, copied = divmod(match.num_kv_tokens, self.spec.page_size)
        needed = self.spec.pages_for(num_tokens) - num_shared
        fits = needed + reserve_pages <= self.pages.num_free + self.pages.num_evictable
        source = match.checkpoint
        slot = self._take_working_slot(source) if fits else None
        if slot is None:
            if node is not None:
                self.tree.unlock(node)
            return None
        stored_pages = self.tree.page_list(Prefix(node, match.num_kv_tokens))
        is_fork = source is not None and slot != source.slot
        if source is not None and is_fork:
            self.tree.pin(source)
        copy = self.evictor.take_pages(1) if copied else []
        assert copy is not None, "there is room"
        checkpoints = self.states.plan(match, num_prompt_tokens, boundaries)
        if source is not None:
            self.evictor.odds.use(source.kind, source.lineage, source.num_uses)
        if node is not None:
            self._touch(match, node)
            if self.evictor.tier is not None and match.num_tokens:
                self.evictor.tier.reused(node, match.num_tokens, source if is_fork else None)
        return Lease(
            tokens=match.tokens,
            salt=match.salt,
            num_prompt_tokens=num_prompt_tokens,
            report=report,
            num_cached_tokens=match.num_tokens,
            write_start=max(match.num_tokens, num_shared * self.spec.page_size),
            page_copy=(stored_pages[num_shared], copy[0]) if copied else None,
            state_fork=(source.slot, slot) if source is not None and is_fork else None,
            fork_source=source if is_fork else None,
            pages=stored_pages[:num_shared] + copy,
            num_shared_pages=num_shared,
            node=node,
            state_slot=slot,
            checkpoints=checkpoints,
            num_committed_tokens=match.num_tokens,
        )

    def lock_prefix(self, match: Match) -> Node | None:
        """Lock exactly the matched path. Returns None if nothing is ever inserted."""
        if not self._keeps:
            return None
        node = match.prefix.node
        if node is None:
            node = self.tree.root(match.salt)
        elif match.num_kv_tokens < node.end:
            node = self.tree.split(node, match.num_kv_tokens)
        self.tree.lock(node)
        return node

    def _touch(self, match: Match, node: Node) -> None:
        """Refresh the ages of the reused state and of the KV that it makes usable."""
        self.tree.clock += 1
        while node.parent is not None and node.start >= match.num_tokens:
            node = node.parent
        self.tree.touch(node, match.checkpoint)

    def _take_working_slot(self, source: Checkpoint | None) -> int | None:
        """Take a free working slot, or else the slot of the matched state. Returns 0 if the model needs no slot."""
        if not self._needs_state:
            return 0
        if source is None:
            return self.evictor.take_slot()
        self.tree.pin(source)
        slot = self.evictor.take_slot()
        self.tree.unpin(source)
        if slot is None and not source.pins:
            if self.evictor.tier is not None:
                self.evictor.tier.state_leaves(source)
            slot = self.tree.take_checkpoint(source, lost=False)
        return slot
