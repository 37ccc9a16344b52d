"""Who holds which pages and slots: the cache as the scheduler sees it.

Job: match a sequence against what is cached, lease pages and a state slot to a request, grow the lease, file what it
computed, take it back. Owns: the pools, the prefix tree and every live lease.
Does not know: tensors, batches, or why a request starts or stops. ::

    match(tokens)        pure: how much could be reused
    lease(match, …)      pin what was matched; a working slot; orders to fork the state and copy the partial last page
    allocate(…)          grow the lease's pages, evicting what is worth least
    order_checkpoints(…) slots for the states that the next step has to store
    commit(…)            a step is launched: so many tokens will be in pages and state
    confirm(…)           a step is done and went well: what it computed is filed in the tree
    release(…)           the request has ended     } pages and the working slot move to the tree or go back;
    preempt(…)           the request will return   } only after its last launched step
    check()              every page and slot is accounted for

Who owns a page or slot::

    free ──allocate──▶ lease ──confirm, release: filed──▶ tree ──evicted──▶ free
                         ▲                                  │
                         └── pages: shared, never written ──┘   slots: forked (copied), or moved if no other is free

A lease reads the pages of its prefix where the tree holds them, and writes only pages of its own: the partial last page
is copied. Positions below ``Lease.write_start`` that have to be computed again, because their KV is there but no state,
read the stored KV and must not be written. The lease locks the prefix that it matched, and below it what the tree lists
of its own pages: where another request brought the same tokens, the tree's pages stay evictable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.cache.checkpoints import (
    MAX_CHECKPOINTS,
    CheckpointPolicy,
    is_decode_position,
    prefill_positions,
)
from weft.cache.eviction import Evictor
from weft.cache.invariants import check_accounts
from weft.cache.lease import CacheStats, Lease
from weft.cache.match import Match, explain
from weft.cache.page_pool import PagePool
from weft.cache.policy import EvictionPolicy, make_policy
from weft.cache.radix_tree import Checkpoint, Node, Prefix, RadixTree, Tokens, as_tokens, common_prefix
from weft.cache.spec import CacheSpec
from weft.cache.state_pool import StatePool

NOTHING = Prefix(None, 0)

Observer = Callable[[Tokens, int, str | None, Sequence[int]], None]
"""Is told of every request that has ended: the tokens fed, how many of them were prompt, salt, borders."""


class Manager:
    """Leases of pages and slots over a prefix tree.

    Args:
        spec: geometry and costs.
        num_pages, num_slots: pool sizes, the reserved page and slot included.
        enable_prefix_caching: False: nothing is kept and every match is empty.
        checkpoint_policy: where states are stored.
        eviction: what goes first; a policy object or the name of one.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_pages: int,
        num_slots: int,
        enable_prefix_caching: bool = False,
        checkpoint_policy: CheckpointPolicy = "exact",
        eviction: EvictionPolicy | str = "flops",
    ) -> None:
        self.spec = spec
        self.pages = PagePool(num_pages)
        self.slots = StatePool(num_slots)
        self.tree = RadixTree(spec.page_size, self.pages, self.slots)
        self.enable_prefix_caching = enable_prefix_caching
        policy = make_policy(eviction) if isinstance(eviction, str) else eviction
        self.evictor = Evictor(spec, self.tree, self.pages, self.slots, policy)
        self.checkpoint_policy: CheckpointPolicy = checkpoint_policy
        self.observer: Observer | None = None
        self._needs_state = spec.has_states
        self._alignment = spec.alignment
        self._leases: set[Lease] = set()
        self._num_query_tokens = self._num_hit_tokens = 0

    @property
    def max_tokens(self) -> int:
        """Tokens that a single request can hold at most."""
        return self.pages.capacity * self.spec.page_size

    def stats(self) -> CacheStats:
        return CacheStats(
            num_free_pages=self.pages.num_free,
            num_evictable_pages=self.pages.num_evictable,
            num_free_slots=self.slots.num_free,
            num_evictable_slots=self.evictor.num_evictable_slots,
            num_query_tokens=self._num_query_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_pages=self.evictor.num_evicted_pages,
            num_evicted_states=self.evictor.num_evicted_states,
        )

    def reset(self) -> bool:
        """Forget every cached prefix and state. False, and nothing changed, while a request holds a lease."""
        if self._leases:
            return False
        return self.evictor.make_room(self.pages.capacity)

    # -- a request comes -------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int] | Tokens, salt: str | None = None, *, reuse: bool = True) -> Match:
        """How much of ``token_ids`` could be reused. Changes nothing.

        Args:
            token_ids: the prompt, and after a preemption what was generated.
            salt: only entries stored under the same salt are seen.
            reuse: False for requests that need every position computed (prompt log probabilities).
        """
        tokens = as_tokens(token_ids)
        if not (reuse and self.enable_prefix_caching):
            return Match(tokens, salt, 0, NOTHING, None, self.tree.version, reuse=reuse)
        prefix = self.tree.match(tokens, salt)
        limit = min(prefix.num_tokens, len(tokens) - 1)
        if not self._needs_state:
            return Match(tokens, salt, limit, prefix, None, self.tree.version)
        checkpoint = prefix.nearest_checkpoint(limit)
        return Match(tokens, salt, checkpoint.position if checkpoint else 0, prefix, checkpoint, self.tree.version)

    def lease(
        self,
        match: Match,
        num_tokens: int | None = None,
        *,
        reserve_pages: int = 0,
        num_prompt_tokens: int | None = None,
        borders: Sequence[int] = (),
    ) -> Lease | None:
        """Pin what was matched and take a working slot and, if one is copied, the page for it.

        Args:
            match: of this moment: nothing may have changed since.
            num_tokens: tokens that the request holds soon; None: those matched against.
            reserve_pages: pages that must be left over for others when it does.
            num_prompt_tokens: leading tokens that are prompt; None: all.
            borders: positions at which the next prompts may leave this one.

        Returns:
            The lease, whose ``state_fork`` and ``page_copy`` must run before its first step; or None, and nothing
            changed, if pages or slots do not suffice now. With no other lease it is never None for a request that fits.
        """
        assert match.version == self.tree.version, "the cache has changed since the match"
        num_tokens = len(match.tokens) if num_tokens is None else num_tokens
        lease = self._try_lease(match, num_tokens, reserve_pages)
        if lease is None and not self._leases and match.num_kv_tokens:
            # Alone and still no room: the shared pages are in the way (their copy needs one page more).
            match = replace(match, num_tokens=0, prefix=NOTHING, checkpoint=None, version=self.tree.version)
            lease = self._try_lease(match, num_tokens, reserve_pages)
        if lease is None:
            return None
        lease.num_prompt_tokens = num_prompt_tokens or len(match.tokens)
        self._plan_checkpoints(lease, match, borders)
        self._num_query_tokens += len(match.tokens)
        self._num_hit_tokens += lease.num_cached_tokens
        self._leases.add(lease)
        return lease

    def _try_lease(self, match: Match, num_tokens: int, reserve_pages: int) -> Lease | None:
        report = explain(match, needs_state=self._needs_state)
        node = self._lock_prefix(match)
        shared, copied = divmod(match.num_kv_tokens, self.spec.page_size)
        needed = max(self.spec.pages_for(num_tokens) - shared, int(copied > 0))
        fits = needed + reserve_pages <= self.pages.num_free + self.pages.num_evictable
        slot = self._take_working_slot(match.checkpoint) if fits else None
        if slot is None:
            if node is not None:
                self.tree.unlock(node)
            return None
        pages = self.tree.page_list(Prefix(node, match.num_kv_tokens))
        lease = Lease(pages[:shared], slot, match.num_tokens, match.num_tokens, report=report, tokens=match.tokens)
        lease.salt, lease.node, lease.num_shared_pages = match.salt, node, shared
        lease.write_start = max(match.num_tokens, shared * self.spec.page_size)
        if match.checkpoint is not None and slot != match.checkpoint.slot:
            lease.state_fork, lease.fork_source = (match.checkpoint.slot, slot), match.checkpoint
            self.tree.pin(match.checkpoint)
        if copied:
            self._take_pages(lease, 1)
            lease.page_copy = (pages[shared], lease.pages[shared])
        if match.checkpoint is not None:
            used = match.checkpoint
            self.evictor.odds.use(used.kind, used.lineage, used.num_uses)
            lease.lineage = used.lineage + 1
        if node is not None:
            self._touch(match, node)
        return lease

    def _lock_prefix(self, match: Match) -> Node | None:
        """Lock exactly what is matched. None if nothing is ever filed."""
        if not self.enable_prefix_caching:
            return None
        node = match.prefix.node
        if node is None:
            node = self.tree.root(match.salt)
        elif match.num_kv_tokens < node.end:
            node = self.tree.split(node, match.num_kv_tokens)
        self.tree.lock(node)
        return node

    def _touch(self, match: Match, node: Node) -> None:
        """Refresh what is consumed: the state, and the KV that it makes usable."""
        self.tree.clock += 1
        while node.parent is not None and node.start >= match.num_tokens:
            node = node.parent
        self.tree.touch(node, match.checkpoint)

    def _take_working_slot(self, source: Checkpoint | None) -> int | None:
        """A slot to work in; that of the matched state itself if there is no other. 0 if the model needs none."""
        if not self._needs_state:
            return 0
        if source is None:
            return self.evictor.take_slot()
        self.tree.pin(source)
        slot = self.evictor.take_slot()
        self.tree.unpin(source)
        if slot is None and not source.pins:
            slot = self.tree.take_checkpoint(source, lost=False)
        return slot

    def _plan_checkpoints(self, lease: Lease, match: Match, borders: Sequence[int]) -> None:
        if not (self._needs_state and self.enable_prefix_caching):
            return
        stored = match.num_kv_tokens
        lease.kinds = dict.fromkeys(borders, "border")
        if lease.num_cached_tokens < stored:
            lease.kinds[stored] = "divergence"
        lease.checkpoint_positions = prefill_positions(
            self.checkpoint_policy,
            reused=lease.num_cached_tokens,
            divergence=stored if lease.num_cached_tokens < stored < len(match.tokens) else None,
            borders=borders,
            num_prompt_tokens=lease.num_prompt_tokens,
            alignment=self._alignment,
        )

    # -- a request grows -------------------------------------------------------------------------------------------

    def is_prefilled(self, lease: Lease) -> bool:
        """Is everything filed that the lease's first tokens have to give? True too if the lease has ended."""
        return lease.is_filed or lease.node is None

    def shareable(self, match: Match, lease: Lease) -> int:
        """How many tokens of ``match`` a running prefill makes reusable once it is confirmed. Changes nothing."""
        if lease.is_filed or lease.node is None or lease.salt != match.salt or not match.reuse:
            return 0
        shared = min(common_prefix(match.tokens, lease.tokens), len(match.tokens) - 1)
        if not self._needs_state:
            return shared
        positions = [p for p in self._pending_positions(lease) if p <= shared]
        return shared if self._can_store(lease, shared) else max(positions, default=0)

    def share(self, match: Match, lease: Lease) -> None:
        """Let a running prefill store a state where ``match`` leaves it, if it has not come that far."""
        position = self.shareable(match, lease)
        if self._needs_state and position not in self._pending_positions(lease) and self._can_store(lease, position):
            lease.checkpoint_positions = sorted([*lease.checkpoint_positions, position])
            lease.kinds[position] = "divergence"

    def _pending_positions(self, lease: Lease) -> list[int]:
        return [position for position, _ in lease.stored] + lease.checkpoint_positions

    def _can_store(self, lease: Lease, position: int) -> bool:
        room = len(self._pending_positions(lease)) < MAX_CHECKPOINTS
        return self.checkpoint_policy == "exact" and room and position > lease.num_committed_tokens

    def can_allocate(self, lease: Lease | None, num_tokens: int, reserve_pages: int = 0) -> bool:
        """Would ``allocate(lease, num_tokens)`` succeed and leave ``reserve_pages``? None: for a fresh lease."""
        missing = self.spec.pages_for(num_tokens) - (len(lease.pages) if lease is not None else 0)
        return max(0, missing) + reserve_pages <= self.pages.num_free + self.pages.num_evictable

    def allocate(self, lease: Lease, num_tokens: int) -> list[int] | None:
        """Grow the lease until it holds ``num_tokens`` tokens, evicting what nobody needs.

        Returns:
            The pages added (often none), or None, and no page taken, if too few can be had. With no other lease, and
            once its first step is launched, it is never None for a request that fits.
        """
        assert lease in self._leases, "the lease has ended"
        missing = self.spec.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return []
        pages = self._take_pages(lease, missing)
        if pages is None and len(self._leases) == 1 and lease.num_committed_tokens > lease.num_cached_tokens:
            self._unshare(lease)
            pages = self._take_pages(lease, missing)
        return pages

    def _unshare(self, lease: Lease) -> None:
        """Hold the shared pages by the lease itself, so that nothing else on their path is kept from eviction."""
        if lease.node is None:
            return
        shared, lease.num_shared_pages = lease.pages[: lease.num_shared_pages], 0
        self.pages.retain(shared)
        self.pages.pin(shared)
        self._move_lock(lease, self.tree.root(lease.salt))

    def _take_pages(self, lease: Lease, count: int) -> list[int] | None:
        if not self.evictor.make_room(count):
            return None
        pages = self.pages.allocate(count)
        assert pages is not None
        self.pages.pin(pages)
        lease.pages.extend(pages)
        return pages

    def order_checkpoints(self, lease: Lease, start: int, num_tokens: int) -> list[tuple[int, int]]:
        """``(position, slot)`` orders for a step that feeds ``num_tokens`` tokens from ``start``; call once, at launch.

        Positions for which no slot can be had are skipped.
        """
        end = start + num_tokens
        due = [p for p in lease.checkpoint_positions if start < p <= end]
        orders: list[tuple[int, int]] = []
        if due:
            lease.checkpoint_positions = [p for p in lease.checkpoint_positions if p > end]
            for position in due:
                slot = self.evictor.take_slot()
                if slot is not None:
                    orders.append((position, slot))
            lease.stored.extend(orders)
        elif start >= len(lease.tokens) and self._takes_snapshot(end):
            slot = self.evictor.take_slot()
            if slot is not None:
                orders = [(end, slot)]
                self._drop_snapshot(lease)
                lease.snapshot = orders[0]
        return orders

    def _takes_snapshot(self, position: int) -> bool:
        wanted = self._needs_state and self.enable_prefix_caching
        return wanted and is_decode_position(self.checkpoint_policy, position, self._alignment)

    def _drop_snapshot(self, lease: Lease) -> None:
        if lease.snapshot is not None:
            self.slots.release(lease.snapshot[1])
            lease.snapshot = None

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """The steps launched so far leave the request with exactly ``num_tokens`` tokens in pages and state.

        Call it once every admission of the step is decided: the states that the step forks may be evicted after it.
        """
        assert lease.num_committed_tokens <= num_tokens <= len(lease.pages) * self.spec.page_size
        lease.num_committed_tokens = num_tokens
        self._unpin_source(lease)

    def confirm(self, lease: Lease, num_tokens: int) -> None:
        """The step that brought the request to ``num_tokens`` tokens is done: its KV and states can be reused.

        Files at checkpoints and at the end of the prefill; what is generated follows when the request goes.
        """
        if lease.is_filed or lease.node is None:
            return
        if num_tokens >= len(lease.tokens) or any(position <= num_tokens for position, _ in lease.stored):
            self._file(lease, lease.tokens[:num_tokens])
            lease.is_filed = num_tokens >= len(lease.tokens)

    def _unpin_source(self, lease: Lease) -> None:
        if lease.fork_source is not None:
            self.tree.unpin(lease.fork_source)
            lease.fork_source = None

    def _file(self, lease: Lease, tokens: Tokens) -> None:
        """Insert the KV of ``tokens`` and the stored states into the tree."""
        assert lease.node is not None
        if len(tokens) > lease.node.end:
            self._lock_own(lease, self.tree.extend(lease.node, tokens, lease.pages))
        for position, slot in [entry for entry in lease.stored if entry[0] <= len(tokens)]:
            self._file_state(lease, tokens, position, slot)
        lease.stored = [entry for entry in lease.stored if entry[0] > len(tokens)]

    def _lock_own(self, lease: Lease, deepest: Node) -> None:
        """Move the lock down the path to ``deepest`` as long as the nodes list pages of the lease.

        Where the tree has pages that another request computed, the lease does not read them: they stay evictable.
        """
        node = lease.node
        below = list(itertools.takewhile(lambda each: each is not node, deepest.path()))
        for each in reversed(below):
            first = each.start // self.spec.page_size
            if each.pages != lease.pages[first : first + len(each.pages)]:
                break
            node = each
        if node is not None and node is not lease.node:
            self._move_lock(lease, node)

    def _move_lock(self, lease: Lease, node: Node) -> None:
        assert lease.node is not None
        self.tree.lock(node)
        self.tree.unlock(lease.node)
        lease.node = node

    def _file_state(self, lease: Lease, tokens: Tokens, position: int, slot: int) -> None:
        """Move a state into the tree; one that is there already is kept, and the slot freed."""
        assert lease.node is not None
        at = self.tree.locate(lease.node, tokens, position)
        kind = lease.kinds.get(position, "inside")
        if at is not None and self.tree.add_checkpoint(at, position, slot, kind, lease.lineage):
            self.evictor.odds.add(kind, lease.lineage, 0)
        else:
            self.slots.release(slot)

    # -- a request goes --------------------------------------------------------------------------------------------

    def release(self, lease: Lease, token_ids: Sequence[int] | Tokens = (), *, keep: bool = True) -> None:
        """The request has ended and its last launched step is done: its KV and state move to the tree.

        Args:
            token_ids: the request's tokens as far as they are known. If more were fed (a step launched past the end),
                the working state belongs to no known sequence and is dropped.
            keep: False: what it computed is worthless (NaN, a step that broke). Nothing is filed, and what it filed
                or reused is forgotten: NaN shows when a token is sampled, wherever it came from.
        """
        tokens, fed, cached = as_tokens(token_ids), lease.num_committed_tokens, lease.node is not None
        self._return(lease, tokens, keep, moves_state=self.checkpoint_policy != "aligned")
        if not keep and cached:
            self._forget(tokens[:fed], lease.salt)
        if keep and self.observer is not None and fed >= len(lease.tokens):
            borders = [position for position, kind in lease.kinds.items() if kind == "border"]
            self.observer(tokens[:fed], lease.num_prompt_tokens, lease.salt, borders)

    def preempt(self, lease: Lease, token_ids: Sequence[int] | Tokens = ()) -> None:
        """The request will come back; its last launched step is done. What it has moves to the tree."""
        self._return(lease, as_tokens(token_ids), keep=True, moves_state=True)

    def _forget(self, tokens: Tokens, salt: str | None) -> None:
        """Drop the states of every prefix of ``tokens``, and the KV that no other sequence needs."""
        node = self.tree.match(tokens, salt).node
        if node is not None:
            self.tree.forget(node)

    def _return(self, lease: Lease, tokens: Tokens, keep: bool, moves_state: bool) -> None:
        assert lease in self._leases, "the lease has ended"
        self._leases.remove(lease)
        self._unpin_source(lease)
        fed = lease.num_committed_tokens
        if lease.node is not None and keep:
            self._hand_over(lease, tokens[:fed], moves_state and len(tokens) >= fed)
        for slot in [slot for _, slot in lease.stored] + [lease.state_slot]:
            if slot:
                self.slots.release(slot)
        self._drop_snapshot(lease)
        own = lease.pages[lease.num_shared_pages :]
        self.pages.unpin(own)
        self.pages.release(own)
        if lease.node is not None:
            self.tree.unlock(lease.node)
        lease.pages, lease.state_slot, lease.node, lease.stored = [], 0, None, []

    def _hand_over(self, lease: Lease, tokens: Tokens, moves_state: bool) -> None:
        """File everything that was fed, the working state under exactly these tokens."""
        was_fed = lease.num_committed_tokens > lease.num_cached_tokens
        was_moved = lease.num_cached_tokens > 0 and lease.state_fork is None  # the slot still is the tree's own state
        if lease.state_slot and len(tokens) and moves_state and (was_fed or was_moved):
            lease.stored.append((len(tokens), lease.state_slot))
            lease.kinds.setdefault(len(tokens), "end")
            lease.state_slot = 0
        if lease.snapshot is not None and not moves_state:
            lease.stored.append(lease.snapshot)
            lease.snapshot = None
        self._file(lease, tokens)

    def check(self) -> None:
        """Assert the invariants: every page and slot is accounted for, nothing leased can be evicted."""
        check_accounts(self.pages, self.slots, self.tree, self._leases)
