"""The lease: the pages and slots of one running request, and the states that it stores.

Does not know: pools, the tree, or when they change.
"""

from dataclasses import dataclass, field

from weft.cache.nodes import Checkpoint, CheckpointKind, Node, Tokens
from weft.outputs import CacheReport

MAX_CHECKPOINTS = 4
"""Upper bound on the states that the prefill of one request stores."""


@dataclass(slots=True)
class DraftStates:
    """The states of a step that verifies drafts. Each position has a slot for its state. Once the number of accepted
    drafts is known, one of these slots becomes the working slot. Nothing is copied or computed again.

    A step over the last token and k drafts stores k + 1 states. The one after the last position goes into the working
    slot, whose content the step has read, the others into spare slots::

        position     start + 1   start + 2   …   start + k   start + 1 + k
        slot         spare[0]    spare[1]    …   spare[k-1]  working slot

    If a drafts are accepted, the slot of position start + 1 + a becomes the working slot, and all others are spare. The
    next step may be launched before a is known. It stores into the same slots in the same order, whichever it reads.

    Attributes:
        spare: slots besides the working slot.
        stored: ``(position, slot)`` of the states that the last step stored, ascending, until the next step. With
            several unsettled steps, those of the first.
        snapshot: ``(position, slot)`` of a state to keep if that position is reached (``aligned``).
        num_unsettled: launched steps whose number of accepted drafts is unknown so far.
    """

    spare: list[int] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)
    snapshot: tuple[int, int] | None = None
    num_unsettled: int = 0

    def trim(self, num_drafts: int) -> list[int]:
        """Drop the stored states, and keep spare slots for ``num_drafts`` drafts. Returns the other slots."""
        self.stored.clear()
        released = self.spare[num_drafts:]
        del self.spare[num_drafts:]
        return released

    def begin(self, start: int, num_drafts: int, state_slot: int) -> list[tuple[int, int]]:
        """The ``(position, slot)`` pairs of a step from ``start``, without the last position."""
        before = list(zip(range(start + 1, start + 1 + num_drafts), self.spare, strict=False))
        assert len(before) == num_drafts, "a draft has no slot"
        self.stored = [*before, (start + 1 + num_drafts, state_slot)]
        self.num_unsettled = 1
        return before

    def follow(self) -> list[int]:
        """Launch a step before the previous one is settled. Returns its slots in the order of positions."""
        assert self.num_unsettled, "there is no step to follow"
        self.num_unsettled += 1
        return [slot for _, slot in self.stored]

    def accept(self, num_accepted: int) -> int:
        """Accept ``num_accepted`` drafts of the first unsettled step. Returns the slot of the state after them."""
        self.num_unsettled -= 1
        slots = [slot for _, slot in self.stored]
        position = self.stored[num_accepted][0]
        slot = self.choose(position)
        if self.num_unsettled:
            self.stored = list(zip(range(position + 1, position + 1 + len(slots)), slots, strict=True))
        return slot

    def choose(self, position: int) -> int:
        """Make the slot of the state after ``position`` tokens the working slot, and return it."""
        ((chosen, slot),) = [entry for entry in self.stored if entry[0] == position]
        held = {*self.spare, *(slot for _, slot in self.stored)}
        self.spare = sorted(held - {slot})
        self.stored = [entry for entry in self.stored if entry[0] <= chosen]
        return slot

    def latest(self, num_tokens: int) -> int | None:
        """The last position within ``num_tokens`` tokens that has a stored state."""
        return max((position for position, _ in self.stored if position <= num_tokens), default=None)

    def slots(self) -> list[int]:
        """All slots besides the working slot."""
        return self.spare + ([self.snapshot[1]] if self.snapshot is not None else [])


@dataclass(slots=True)
class LeaseCheckpoints:
    """The states that a request stores while it runs. Positions are numbers of tokens.

    Attributes:
        positions: positions of states to store, ascending.
        kinds: the reason for each state, by position; ``"inside"`` if there is no other.
        lineage: number of reuses on the way to the reused state, including that one.
        stored: ``(position, slot)`` of states that launched steps store and the tree does not have yet.
        snapshot: ``(position, slot)`` of the last state stored while decoding (``aligned``).
    """

    positions: list[int] = field(default_factory=list)
    kinds: dict[int, CheckpointKind] = field(default_factory=dict)
    lineage: int = 0
    stored: list[tuple[int, int]] = field(default_factory=list)
    snapshot: tuple[int, int] | None = None

    def pending(self) -> list[int]:
        """Positions of all states, stored or to be stored, that the tree does not have yet."""
        return [position for position, _ in self.stored] + self.positions

    @property
    def has_room(self) -> bool:
        """Whether the prefill may store another state."""
        return len(self.pending()) < MAX_CHECKPOINTS

    def add(self, position: int, kind: CheckpointKind) -> None:
        """Store one more state."""
        self.positions = sorted([*self.positions, position])
        self.kinds[position] = kind

    def take_due(self, start: int, end: int) -> list[int]:
        """Remove and return the positions that a step over tokens ``start`` to ``end`` passes."""
        due = [position for position in self.positions if start < position <= end]
        self.positions = [position for position in self.positions if position > end]
        return due

    def take_stored(self, num_tokens: int) -> list[tuple[int, int]]:
        """Remove and return the stored states up to ``num_tokens``."""
        reached = [entry for entry in self.stored if entry[0] <= num_tokens]
        self.stored = [entry for entry in self.stored if entry[0] > num_tokens]
        return reached

    def slots(self) -> list[int]:
        return [slot for _, slot in self.stored] + ([self.snapshot[1]] if self.snapshot is not None else [])


@dataclass(slots=True, eq=False)
class Lease:
    """The resources of one running request.

    Its tokens, and where their KV is::

        0             num_cached_tokens     write_start           num_committed_tokens          pages * page_size
        |-- reused -----------|-- recomputed -----|-- computed, written -----|-- room for tokens to come --|
        |   KV and state      |   KV is read only |                          |                             |
        |== shared pages, of the locked path ==|======== own pages, the first may begin as a copy =========|

    Recomputed tokens have KV in the tree, but no later state; models without recurrent layers have none.
    ``write_start`` is the end of the shared pages. If ``num_cached_tokens`` lies in an own page, it is that number: the
    tree's page was copied, and the reused part of the copy is not written.

    Attributes:
        tokens, salt, num_prompt_tokens: the tokens known when the lease was taken, the salt of the entries that they
            may use, and the number of prompt tokens.
        report: the prefix that the request found in the cache.
        num_cached_tokens: tokens whose KV and state are reused.
        write_start: first position whose KV may be written.
        page_copy: ``(src, dst)``, a page to copy before the first step, or None.
        state_fork: ``(src, dst)``, a slot to copy before the first step, or None.
        fork_source: the state that ``state_fork`` reads, pinned until the step is launched.
        pages: page ids in order; position ``p`` lives in ``pages[p // page_size]``.
        num_shared_pages: number of leading ``pages`` that belong to locked nodes; the lease has a reference to each of
            the others.
        node: the tree node up to which the path is locked; None without a prefix cache, and after the end of the lease.
        state_slot: working slot, 0 if the model has no recurrent layers.
        checkpoints: the states that the request stores.
        drafts: slots for the states after drafts.
        num_committed_tokens: tokens fed by the launched steps, which is the position of the working state. A launched
            step that verifies drafts counts with all of them until ``DraftSlots.accept``.
        is_inserted: the tree has everything that ``tokens`` can insert.
    """

    tokens: Tokens
    salt: str | None
    num_prompt_tokens: int
    report: CacheReport
    num_cached_tokens: int
    write_start: int
    page_copy: tuple[int, int] | None
    state_fork: tuple[int, int] | None
    fork_source: Checkpoint | None
    pages: list[int]
    num_shared_pages: int
    node: Node | None
    state_slot: int
    checkpoints: LeaseCheckpoints
    num_committed_tokens: int
    is_inserted: bool = False
    drafts: DraftStates = field(default_factory=DraftStates)

    @property
    def is_prefilled(self) -> bool:
        """Whether the tree has everything that the lease's first tokens can insert, or the lease has ended."""
        return self.is_inserted or self.node is None

    @property
    def own_pages(self) -> list[int]:
        return self.pages[self.num_shared_pages :]
