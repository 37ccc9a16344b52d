"""The cache manager: the owner of each page and state slot is one request, or one tree node.

Job: match a sequence against the cache, lease pages and a state slot to a request, grow the lease, insert its results
into the tree, end the lease. Owns: the pools, the prefix tree and every live lease. Does not know: tensors, batches, or
why a request starts or stops. The calls in order::

    match(tokens)            look up how much can be reused; changes nothing
    lease(match, …)          pin the match; take a working slot; order copies: state fork, partial last page
    allocate(…)              grow the lease's pages, evicting the least useful entries
    allocate_checkpoints(…)  allocate slots for the states that the next step stores
    commit(…)                a step is launched: note its tokens in pages and state
    drafts                   slots of the states after drafts (cache/draft_slots.py)
    states                   the states to store, and the request that stores each (cache/state_plan.py)
    confirm(…)               a step succeeded: insert its results into the tree
    release(…)               the request has ended     } move pages and working slot to the tree, or free them;
    preempt(…)               the request will return   } only after its last launched step
    check()                  assert that every page and slot is accounted for

Who owns a page or slot::

    free ──allocate──▶ lease ──confirm, release: inserted──▶ tree ──evicted──▶ free
                         ▲                                     │
                         └──── pages: shared, never written ───┘   slots: forked (copied), or moved if no other is free

A lease reads the tree's pages of its prefix, and writes only pages of its own; the partial last page is copied.
Positions below ``Lease.write_start`` whose KV is stored without a state are computed again. They read the stored KV and
must not write it. The lease locks the matched prefix, and below it the nodes that list its own pages. If another
request inserted the same tokens, the tree's pages stay evictable.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from weft.cache.draft_slots import DraftSlots
from weft.cache.eviction import Evictor
from weft.cache.insertion import insert, move_lock
from weft.cache.invariants import check_accounts
from weft.cache.lease import DraftStates, Lease
from weft.cache.leasing import Leasing
from weft.cache.match import Match
from weft.cache.nodes import Prefix, Tokens, as_tokens
from weft.cache.policy import EvictionPolicy, make_policy
from weft.cache.pools import PagePool, StatePool
from weft.cache.radix_tree import RadixTree
from weft.cache.reuse_grid import ReuseGrid
from weft.cache.spec import CacheSpec
from weft.cache.state_plan import CheckpointPolicy, StatePlan
from weft.cache.tier import Tier
from weft.stats import CacheStats

EMPTY_PREFIX = Prefix(None, 0)

NO_STATES: list[tuple[int, int]] = []  # shared by most requests of most steps, so never changed


class EndedRequest(NamedTuple):
    """A request that has ended: the tokens fed, the number of prompt tokens among them, and its turn boundaries."""

    tokens: Tokens
    num_prompt_tokens: int
    salt: str | None
    boundaries: Sequence[int]


class Manager:
    """Leases of pages and slots over a prefix tree.

    Args:
        spec: geometry and costs.
        num_pages, num_slots: pool sizes, the reserved page and slot included.
        enable_prefix_caching: False: nothing is kept, and every match is empty.
        checkpoint_policy: the rule that decides where states are stored.
        eviction: the rule that decides what is evicted first; a policy object or the name of one.
        grid: only what prefills computed up to its points is reused; None: everything.
        tier: a tier below the device, which keeps what is evicted.

    Attributes:
        observer: called with every request that has ended, if its whole prompt was computed.
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
        grid: ReuseGrid | None = None,
        tier: Tier | None = None,
    ) -> None:
        self.spec, self.tier = spec, tier
        self.pages = PagePool(num_pages)
        self.slots = StatePool(num_slots)
        self.tree = RadixTree(spec.page_size, self.pages, self.slots)
        self.enable_prefix_caching = enable_prefix_caching
        policy = make_policy(eviction) if isinstance(eviction, str) else eviction
        self.evictor = Evictor(spec, self.tree, self.pages, self.slots, policy)
        self.evictor.tier = tier
        self.checkpoint_policy: CheckpointPolicy = checkpoint_policy
        self._grid = grid
        self.states = StatePlan(spec, checkpoint_policy, keeps=enable_prefix_caching, grid=grid)
        self.drafts = DraftSlots(spec, self.slots, self.evictor, self.states, self.allocate)
        self._leasing = Leasing(spec, self.tree, self.evictor, self.pages, self.states, enable_prefix_caching)
        self.lock_prefix = self._leasing.lock_prefix
        self.observer: Callable[[EndedRequest], object] | None = None
        self._needs_state = spec.has_states
        self._leases: set[Lease] = set()
        self._num_query_tokens = self._num_hit_tokens = 0

    @property
    def max_tokens(self) -> int:
        """Upper bound on the tokens of a single request."""
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
        """Drop every cached prefix and state, in all tiers. Returns False, and changes nothing, while a request holds a
        lease."""
        if self._leases:
            return False
        self.evictor.tier = None
        self.evictor.make_room(self.pages.capacity)
        self.evictor.tier = self.tier
        if self.tier is not None:
            self.tier.clear()
        self.tree.version += 1  # earlier lookups may have found something in a tier
        return True

    def evict_all(self) -> None:
        """Evict everything that no lease needs, down to the tier below."""
        self.evictor.make_room(self.pages.num_free + self.pages.num_evictable)

    def match(
        self,
        token_ids: Sequence[int] | Tokens,
        salt: str | None = None,
        *,
        reuse: bool = True,
        num_prompt_tokens: int | None = None,
    ) -> Match:
        """Look up how much of ``token_ids`` can be reused. Changes nothing.

        Args:
            token_ids: the prompt, and after a preemption also the generated tokens.
            salt: only entries stored under the same salt match.
            reuse: False for requests that need every position computed (prompt log probabilities).
            num_prompt_tokens: number of leading tokens that are prompt; None: all.
        """
        tokens = as_tokens(token_ids)
        if not (reuse and self.enable_prefix_caching):
            return Match(tokens, salt, 0, EMPTY_PREFIX, None, self.tree.version, reuse=reuse)
        prefix = self._stored_prefix(tokens, salt, len(tokens) if num_prompt_tokens is None else num_prompt_tokens)
        limit = min(prefix.num_tokens, len(tokens) - 1)
        checkpoint = prefix.nearest_checkpoint(limit) if self._needs_state else None
        num_tokens = (checkpoint.position if checkpoint is not None else 0) if self._needs_state else limit
        below = self.tier.look_up(tokens, salt, prefix, num_tokens) if self.tier is not None else None
        return Match(tokens, salt, num_tokens, prefix, checkpoint, self.tree.version, below=below)

    def _stored_prefix(self, tokens: Tokens, salt: str | None, num_prompt_tokens: int) -> Prefix:
        """The longest stored prefix; with a grid, up to a point of it."""
        if self._grid is None:
            return self.tree.match(tokens, salt)
        end = self._grid.most_reused(num_prompt_tokens)
        end = self._grid.floor(self.tree.match(tokens[:end], salt).num_tokens)
        return self.tree.match(tokens[:end], salt)

    def lease(
        self,
        match: Match,
        num_tokens: int | None = None,
        *,
        reserve_pages: int = 0,
        num_prompt_tokens: int | None = None,
        boundaries: Sequence[int] = (),
    ) -> Lease | None:
        """Pin the match, and take a working slot and the page for a copy, if needed.

        Args:
            match: a match from which nothing has changed since.
            num_tokens: number of tokens that the request holds soon; None: those of the match.
            reserve_pages: number of pages that must be left for others afterwards.
            num_prompt_tokens: number of leading tokens that are prompt; None: all.
            boundaries: positions at which the next prompts may diverge.

        Returns:
            The lease, whose ``state_fork`` and ``page_copy`` must run before its first step. None, with nothing
            changed, if pages or slots do not suffice now. Without other leases it is never None for a request that
            fits.
        """
        assert match.version == self.tree.version, "the cache has changed since the match"
        num_tokens = len(match.tokens) if num_tokens is None else num_tokens
        num_prompt_tokens = num_prompt_tokens or len(match.tokens)
        lease = self._leasing.start(match, num_tokens, reserve_pages, num_prompt_tokens, boundaries)
        if lease is None and not self._leases and match.num_kv_tokens:
            # Without other leases only the shared pages can be in the way (their copy needs one page more).
            match = replace(match, num_tokens=0, prefix=EMPTY_PREFIX, checkpoint=None, version=self.tree.version)
            lease = self._leasing.start(match, num_tokens, reserve_pages, num_prompt_tokens, boundaries)
        if lease is None:
            return None
        self._num_query_tokens += len(match.tokens)
        self._num_hit_tokens += lease.num_cached_tokens
        self._leases.add(lease)
        return lease

    def allocate(self, lease: Lease, num_tokens: int) -> list[int] | None:
        """Grow the lease until it holds ``num_tokens`` tokens, evicting entries that no lease needs.

        Returns:
            The pages added (often none). None, with no page taken, if there are too few. For a request that fits, it is
            never None without other leases, once the request's first step is launched.
        """
        assert lease in self._leases, "the lease has ended"
        missing = self.spec.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return []
        pages = self.evictor.take_pages(missing)
        if pages is None and len(self._leases) == 1 and lease.num_committed_tokens > lease.num_cached_tokens:
            self._unshare(lease)
            pages = self.evictor.take_pages(missing)
        lease.pages.extend(pages or ())
        return pages

    def _unshare(self, lease: Lease) -> None:
        """Take references to the shared pages, so that the rest of their path becomes evictable."""
        if lease.node is None:
            return
        shared, lease.num_shared_pages = lease.pages[: lease.num_shared_pages], 0
        self.pages.retain(shared)
        self.pages.pin(shared)
        move_lock(lease, self.tree.root(lease.salt), self.tree)

    def allocate_checkpoints(
        self, lease: Lease, start: int, num_tokens: int, num_drafts: int = 0
    ) -> list[tuple[int, int]]:
        """The ``(position, slot)`` pairs of the states that a step of ``num_tokens`` tokens from ``start`` stores. The
        last ``num_drafts`` tokens are drafts.

        Call it once, when the step is launched. A position without an available slot is skipped, unless it is a draft.
        """
        if not self._needs_state:
            return NO_STATES
        if num_drafts:
            return self.drafts.store(lease, start, num_drafts)
        lease.drafts.stored.clear()  # slots of an earlier step, which this one does not write
        end, states, checkpoints = start + num_tokens, lease.checkpoints, NO_STATES
        if states.positions and (due := states.take_due(start, end)):
            slots = [(position, self.evictor.take_slot()) for position in due]
            checkpoints = [(position, slot) for position, slot in slots if slot is not None]
            states.stored.extend(checkpoints)
        elif self.states.takes_snapshot(end) and start >= len(lease.tokens):
            slot = self.evictor.take_slot()
            if slot is not None:
                checkpoints = [(end, slot)]
                self.drafts.keep_snapshot(lease, checkpoints[0])
        return checkpoints

    def commit(self, lease: Lease, num_tokens: int) -> None:
        """Note that the launched steps leave the request with exactly ``num_tokens`` tokens in pages and state.

        Call it after every admission of the step is decided, since the states that the step forks may be evicted
        afterwards.
        """
        assert lease.num_committed_tokens <= num_tokens <= len(lease.pages) * self.spec.page_size
        lease.num_committed_tokens = num_tokens
        self._unpin_source(lease)

    def confirm(self, lease: Lease, num_tokens: int) -> None:
        """Note that the request's first ``num_tokens`` tokens are computed, so that KV and states can be reused.

        Both are inserted into the tree at checkpoints and at the end of the prefill. Generated tokens are inserted when
        the request ends.
        """
        if lease.is_inserted or lease.node is None:
            return
        whole = len(lease.tokens) if self._grid is None else lease.num_prompt_tokens
        if num_tokens >= whole or any(p <= num_tokens for p, _ in lease.checkpoints.stored):
            insert(lease, self._reusable(lease, lease.tokens[:num_tokens]), self.tree, self.slots, self.evictor.odds)
            lease.is_inserted = num_tokens >= whole

    def _reusable(self, lease: Lease, tokens: Tokens) -> Tokens:
        """The first of the lease's ``tokens``, as far as others may reuse what was computed of them."""
        return tokens if self._grid is None else tokens[: self._grid.floor(min(len(tokens), lease.num_prompt_tokens))]

    def _unpin_source(self, lease: Lease) -> None:
        if lease.fork_source is not None:
            self.tree.unpin(lease.fork_source)
            lease.fork_source = None

    def release(self, lease: Lease, token_ids: Sequence[int] | Tokens = (), *, keep: bool = True) -> None:
        """End a request whose last launched step is done, and move its KV and state to the tree.

        Args:
            token_ids: the request's known tokens. If more were fed (a step launched past the end), the working state
                belongs to no known sequence and is dropped.
            keep: False: its results are worthless (NaN, a step that raised). Nothing is inserted, and everything that
                it inserted or reused is dropped, since NaN becomes visible only when a token is sampled.
        """
        tokens, cached = as_tokens(token_ids), lease.node is not None
        if len(tokens) < lease.num_committed_tokens:
            self.drafts.rewind(lease, len(tokens))
        fed = lease.num_committed_tokens
        self._return(lease, tokens, keep, moves_state=self.checkpoint_policy != "aligned")
        if not keep and cached and self.tier is not None:
            self.tier.forget(tokens[:fed], lease.salt)
        if not keep and cached and (node := self.tree.match(tokens[:fed], lease.salt).node) is not None:
            self.tree.remove_path(node)  # drop the states of every prefix, and the KV that no other sequence needs
        if keep and self.observer is not None and fed >= len(lease.tokens):
            boundaries = [position for position, kind in lease.checkpoints.kinds.items() if kind == "boundary"]
            self.observer(EndedRequest(tokens[:fed], lease.num_prompt_tokens, lease.salt, boundaries))

    def preempt(self, lease: Lease, token_ids: Sequence[int] | Tokens = ()) -> None:
        """Preempt a request whose last launched step is done, and move its KV and state to the tree. The request will
        return."""
        self._return(lease, as_tokens(token_ids), keep=True, moves_state=True)

    def _return(self, lease: Lease, tokens: Tokens, keep: bool, moves_state: bool) -> None:
        assert lease in self._leases, "the lease has ended"
        self._leases.remove(lease)
        self._unpin_source(lease)
        fed = lease.num_committed_tokens
        if lease.node is not None and keep:
            self._hand_over(lease, tokens[:fed], moves_state and len(tokens) >= fed)
        self._free(lease)

    def _free(self, lease: Lease) -> None:
        """Free what the lease still holds."""
        for slot in [*lease.checkpoints.slots(), *lease.drafts.slots(), lease.state_slot]:
            if slot:
                self.slots.release(slot)
        own = lease.own_pages
        self.pages.unpin(own)
        self.pages.release(own)
        if lease.node is not None:
            self.tree.unlock(lease.node)
        lease.pages, lease.state_slot, lease.node = [], 0, None
        lease.checkpoints.stored, lease.checkpoints.snapshot = [], None
        lease.drafts = DraftStates()

    def _hand_over(self, lease: Lease, tokens: Tokens, moves_state: bool) -> None:
        """Insert all tokens that were fed, with the working state at exactly these tokens."""
        states, was_fed = lease.checkpoints, lease.num_committed_tokens > lease.num_cached_tokens
        moves_state = moves_state and self._grid is None  # a request's end is no point of a grid
        tokens = self._reusable(lease, tokens)
        was_moved = lease.num_cached_tokens > 0 and lease.state_fork is None  # the slot is still the tree's own state
        if lease.state_slot and len(tokens) and moves_state and (was_fed or was_moved):
            states.stored.append((len(tokens), lease.state_slot))
            states.kinds.setdefault(len(tokens), "end")
            lease.state_slot = 0
        if states.snapshot is not None and not moves_state:
            states.stored.append(states.snapshot)
            states.snapshot = None
        insert(lease, tokens, self.tree, self.slots, self.evictor.odds, ends=True)

    def hold(self, lease: Lease) -> None:
        """Count a lease that no request has, for a restore."""
        self._leases.add(lease)

    def restored(self, lease: Lease, *, keep: bool) -> None:
        """End such a lease, and insert its KV and state into the tree if ``keep``."""
        self._leases.remove(lease)
        if keep:
            insert(lease, lease.tokens, self.tree, self.slots, self.evictor.odds, ends=True)
        self._free(lease)

    def check(self) -> None:
        """Assert the invariants: every page and slot has one owner, and nothing leased can be evicted."""
        check_accounts(self.pages, self.slots, self.tree, self._leases)
