"""What one running request holds of the cache, and the cache's figures.

Job: the records that ``Manager`` hands out. Owns: their fields. Does not know: how they change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.cache.checkpoints import CheckpointKind
from weft.cache.radix_tree import Checkpoint, Node, Tokens, as_tokens
from weft.outputs import CacheReport


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds.

    Attributes:
        pages: page ids in order; position ``p`` lives in ``pages[p // page_size]``.
        state_slot: working slot, 0 if the model has no recurrent layers.
        num_cached_tokens: tokens whose KV and state were reused.
        num_committed_tokens: tokens fed by the launched steps: the position of the working state.
        write_start: first position whose KV may be written; from ``num_cached_tokens`` to there it is read only.
        state_fork: ``(src, dst)``: copy this slot before the first step; None: nothing to copy.
        page_copy: ``(src, dst)``: copy this page before the first step; None: nothing to copy.
        report: what the request found in the cache.
        tokens: the tokens known when the lease was taken.
        checkpoint_positions: where states are still to be stored, ascending.
        salt, num_prompt_tokens: of the request.
        kinds: why a state is kept, by position; ``"inside"`` where nothing else is said.
        lineage: reuses on the way to the state that was reused, that one included.
        node: the tree node up to which the path is locked; None without a prefix cache.
        num_shared_pages: leading ``pages`` of locked nodes; the lease has a reference to each of the others.
        fork_source: the state that ``state_fork`` reads, pinned until the step is launched.
        stored: ``(position, slot)`` of states that launched steps store, not yet filed in the tree.
        snapshot: ``(position, slot)`` of the last state kept while decoding (``aligned``).
        is_filed: what ``tokens`` have to give is in the tree.
    """

    pages: list[int] = field(default_factory=list)
    state_slot: int = 0
    num_cached_tokens: int = 0
    num_committed_tokens: int = 0
    write_start: int = 0
    state_fork: tuple[int, int] | None = None
    page_copy: tuple[int, int] | None = None
    report: CacheReport | None = None
    tokens: Tokens = field(default_factory=lambda: as_tokens([]))
    checkpoint_positions: list[int] = field(default_factory=list)
    salt: str | None = None
    node: Node | None = None
    num_shared_pages: int = 0
    fork_source: Checkpoint | None = None
    stored: list[tuple[int, int]] = field(default_factory=list)
    snapshot: tuple[int, int] | None = None
    is_filed: bool = False
    lineage: int = 0
    num_prompt_tokens: int = 0
    kinds: dict[int, CheckpointKind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Gauges and counters since the start, in tokens, pages and slots.

    ``num_evictable_*`` hold something that no running request needs. Queries and hits count every admission of a
    request, resumed ones too.
    """

    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_free_slots: int = 0
    num_evictable_slots: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0
    num_evicted_states: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that were reused."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0
