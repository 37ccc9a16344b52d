"""The prefix tree (a radix tree): token sequences whose KV and recurrent states are cached.

Job: find the longest stored prefix, insert spans and states, split, lock, cut. Owns: the nodes, one reference to every
page that a node lists, and the slots of the checkpoints. Does not know: requests, tensors, or what is evicted first
(``eviction`` decides; the tree notifies its ``Watcher`` of entries that may be evictable).

A node is a span of tokens ``[start, end)`` below its parent, at token granularity::

    root ── "system prompt" [0, 1500) ──┬── "question A …" [1500, 2200)   pages 93 (shared or copied), 94, …
            pages 0 … 93 (93 is partial)└── "question B …" [1500, 1721)

A node lists the pages of its positions, ``start // page_size`` to ``(end - 1) // page_size``. If a node ends inside a
page, parent and child both list a page for that index: the same one (a span that was split or continued) or a copy (a
branch). Either way the *deepest* listing holds the KV of the whole path up to its node's end.

A checkpoint is a recurrent state after exactly ``position`` tokens, ``start < position <= end``. A node that lost its
checkpoints and keeps its KV is a tombstone. The tree remembers what it lost and when, to explain misses.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from weft.cache.nodes import Checkpoint, CheckpointKind, Node, Prefix, Tokens, common_prefix
from weft.cache.pools import PagePool, StatePool

MAX_REMEMBERED = 256
"""Upper bound on evicted continuations that one node remembers, for explanations only."""


class Watcher(Protocol):
    """Is notified of entries that may have become evictable, or less useful."""

    def offer_leaf(self, node: Node) -> None: ...

    def offer_state(self, checkpoint: Checkpoint) -> None: ...


class RadixTree:
    """Token sequences with their pages and states, one root per salt."""

    def __init__(self, page_size: int, pages: PagePool, slots: StatePool) -> None:
        self.page_size = page_size
        self.clock = 0
        self.version = 0
        self.num_checkpoints = 0
        self.num_pinned_checkpoints = 0
        self.watcher: Watcher | None = None
        self._pages = pages
        self._slots = slots
        self._roots: dict[str | None, Node] = {}

    @property
    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def match(self, tokens: Tokens, salt: str | None = None) -> Prefix:
        """Find the longest prefix of ``tokens`` whose KV is stored under ``salt``. Changes nothing, not even ages."""
        root = self._roots.get(salt)
        return Prefix(None, 0) if root is None else self.descend(root, tokens)

    def descend(self, node: Node, tokens: Tokens) -> Prefix:
        """Find the longest stored prefix of ``tokens``, given that the path of ``node`` is a part of it."""
        position = node.end
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens[position:])
            node, position = child, position + shared
            if shared < len(child.tokens):
                break
        return Prefix(node, position)

    def page_list(self, prefix: Prefix) -> list[int]:
        """The pages of a prefix in order. If several nodes list an index, the deepest listing counts."""
        count = -(-prefix.num_tokens // self.page_size)
        listed: list[list[int]] = []
        for node in prefix.node.path() if prefix.node is not None else ():
            first = node.start // self.page_size
            if first < count:
                listed.append(node.pages[: count - first])
                count = first
        return [page for pages in reversed(listed) for page in pages]

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children, including roots (empty spans)."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def root(self, salt: str | None) -> Node:
        """The root of ``salt``, created if need be."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, 0, np.zeros(0, dtype=np.int64), [], salt=salt)
        return root

    def split(self, node: Node, position: int) -> Node:
        """Cut ``node`` at ``position`` inside its span. Returns the new upper part; ``node`` becomes the lower one."""
        assert node.parent is not None and node.start < position < node.end
        cut = position - node.start
        first = node.start // self.page_size
        upper = Node(
            node.parent,
            node.start,
            node.tokens[:cut],
            node.pages[: -(-position // self.page_size) - first],
            last_used=node.last_used,
            locks=node.locks,
        )
        kept = node.pages[position // self.page_size - first :]
        if position % self.page_size:
            self._pages.retain(kept[:1])
            if node.locks:
                self._pages.pin(kept[:1])
        node.parent.children[int(node.tokens[0])] = upper
        num_keys = position // self.page_size - first
        upper.page_keys, node.page_keys = node.page_keys[:num_keys], node.page_keys[num_keys:]
        node.parent, node.start, node.tokens, node.pages = upper, position, node.tokens[cut:], kept
        upper.children[int(node.tokens[0])] = node
        _move_states(node, upper, position)
        self.version += 1
        return upper

    def extend(self, node: Node, tokens: Tokens, pages: Sequence[int]) -> Node:
        """Insert the KV of ``tokens`` below ``node``, whose path is a prefix of them.

        Args:
            node: where to start; a root will do.
            tokens: the whole sequence from position 0.
            pages: the pages of the whole sequence from position 0. Existing nodes keep their own pages. New nodes
                take a reference to each further page.

        Returns:
            The deepest node on the path that ends at or before ``len(tokens)``.
        """
        prefix = self.descend(node, tokens)
        at = prefix.node
        assert at is not None
        if prefix.num_tokens == len(tokens):
            return at if at.end == prefix.num_tokens or at is node else _parent(at)
        if prefix.num_tokens < at.end:
            at = self.split(at, prefix.num_tokens)
        first = prefix.num_tokens // self.page_size
        held = list(pages[first : -(-len(tokens) // self.page_size)])
        self._pages.retain(held)
        leaf = Node(at, prefix.num_tokens, tokens[prefix.num_tokens :].copy(), held, last_used=self.clock)
        at.children[int(leaf.tokens[0])] = leaf
        self.version += 1
        self._offer_leaf(leaf)
        return leaf

    def locate(self, node: Node, tokens: Tokens, position: int) -> Node | None:
        """Find the node that holds the end of ``tokens[:position]``, searching up and down from ``node`` on its
        path."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        prefix = self.descend(node, tokens[:position]) if node.end < position else Prefix(node, position)
        return prefix.node if prefix.num_tokens == position else None

    def add_checkpoint(
        self, node: Node, position: int, slot: int, kind: CheckpointKind = "end", lineage: int = 0
    ) -> bool:
        """Add ``slot`` as the state after ``position`` tokens. Returns False, and takes nothing, if there is a state
        already."""
        assert node.attached and node.start < position <= node.end
        if position in node.checkpoints:
            return False
        checkpoint = Checkpoint(position, slot, node, self.clock, kind, lineage)
        node.checkpoints[position] = checkpoint
        node.lost_states.pop(position, None)
        self.num_checkpoints += 1
        self.version += 1
        if self.watcher is not None:
            self.watcher.offer_state(checkpoint)
            for below in _next_states(node, position):
                self.watcher.offer_state(below)  # its value was counted from a state further above
        return True

    def take_checkpoint(self, checkpoint: Checkpoint, *, lost: bool) -> int:
        """Remove a state and keep its KV. Returns the slot, which then belongs to the caller.

        ``lost`` says that the state was evicted, and not moved to a request that will return it.
        """
        node = checkpoint.node
        assert checkpoint.attached and not checkpoint.pins
        del node.checkpoints[checkpoint.position]
        checkpoint.attached = False
        if lost:
            node.lost_states[checkpoint.position] = time.monotonic()
        self.num_checkpoints -= 1
        self.version += 1
        self._offer_leaf(node)
        return checkpoint.slot

    def lock(self, node: Node) -> None:
        """Add a lease to ``node`` and to every node above it."""
        for each in node.path():
            each.locks += 1
            if each.locks == 1:
                self._pages.pin(each.pages)

    def unlock(self, node: Node) -> None:
        """Remove a lease from ``node`` and from every node above it. Empty roots of unused salts are removed."""
        for each in node.path():
            assert each.locks > 0, "a node is unlocked more often than it was locked"
            each.locks -= 1
            if each.locks == 0:
                self._pages.unpin(each.pages)
                self._offer_leaf(each)
        self._drop_if_empty_root(each)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Pin a state that a fork will read, until the fork is launched."""
        self.num_pinned_checkpoints += checkpoint.pins == 0
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.pins > 0
        checkpoint.pins -= 1
        self.num_pinned_checkpoints -= checkpoint.pins == 0
        if checkpoint.pins == 0 and self.watcher is not None:
            self.watcher.offer_state(checkpoint)

    def touch(self, node: Node, checkpoint: Checkpoint | None) -> None:
        """Mark the path to ``node``, and ``checkpoint``, as used now."""
        for each in node.path():
            each.last_used = self.clock
        if checkpoint is not None:
            checkpoint.last_used = self.clock
            checkpoint.num_uses += 1

    def trim(self, leaf: Node, end: int) -> None:
        """Remove the KV of an unlocked leaf from position ``end`` on, with the states there, or the whole leaf if
        ``end`` is its start."""
        assert leaf.is_evictable_leaf and leaf.start <= end < leaf.end
        parent = _parent(leaf)
        remember = parent if end == leaf.start else leaf
        _remember(remember.lost_continuations, int(leaf.tokens[end - leaf.start]))
        for position in [p for p in leaf.checkpoints if p > end]:
            self._slots.release(self.take_checkpoint(leaf.checkpoints[position], lost=False))
        kept = -(-end // self.page_size) - leaf.start // self.page_size if end > leaf.start else 0
        self._pages.release(leaf.pages[kept:])
        if end == leaf.start:
            del parent.children[int(leaf.tokens[0])]
            leaf.attached, leaf.parent, leaf.pages = False, None, []
            self._offer_leaf(parent)
            self._drop_if_empty_root(parent)
        else:
            leaf.tokens, leaf.pages = leaf.tokens[: end - leaf.start], leaf.pages[:kept]
            leaf.page_keys = leaf.page_keys[: end // self.page_size - leaf.start // self.page_size]
            leaf.lost_states = {p: when for p, when in leaf.lost_states.items() if p <= end}
            self._offer_leaf(leaf)
        self.version += 1

    def remove_path(self, node: Node) -> None:
        """Remove the states on the path to ``node``, and the KV there that no other sequence needs."""
        for each in [each for each in node.path() if each.parent is not None]:
            for checkpoint in [c for c in each.checkpoints.values() if not c.pins]:
                self._slots.release(self.take_checkpoint(checkpoint, lost=True))
            if each.is_evictable_leaf:
                self.trim(each, each.start)

    def _drop_if_empty_root(self, node: Node) -> None:
        """Remove the empty root of an unused salt. The root of unsalted prompts stays, with its memory of evictions."""
        if node.parent is None and node.salt is not None and not node.children and not node.locks:
            del self._roots[node.salt]
            node.attached = False

    def _offer_leaf(self, node: Node) -> None:
        if self.watcher is not None and node.is_evictable_leaf:
            self.watcher.offer_leaf(node)


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent


def _move_states(lower: Node, upper: Node, position: int) -> None:
    """Move states up to ``position`` to the upper node after a split."""
    for at in [p for p in lower.checkpoints if p <= position]:
        checkpoint = lower.checkpoints.pop(at)
        checkpoint.node = upper
        upper.checkpoints[at] = checkpoint
    for at in [p for p in lower.lost_states if p <= position]:
        upper.lost_states[at] = lower.lost_states.pop(at)


def _next_states(node: Node, position: int) -> Iterator[Checkpoint]:
    """The first states below ``position`` on every branch."""
    later = min((p for p in node.checkpoints if p > position), default=None)
    if later is not None:
        yield node.checkpoints[later]
        return
    stack = list(node.children.values())
    while stack:
        below = stack.pop()
        if below.checkpoints:
            yield below.checkpoints[min(below.checkpoints)]
        else:
            stack.extend(below.children.values())


def _remember(lost: dict[int, float], token: int) -> None:
    """Note when the continuation that starts with ``token`` was evicted. The oldest notes are dropped."""
    lost.pop(token, None)
    lost[token] = time.monotonic()
    if len(lost) > MAX_REMEMBERED:
        del lost[next(iter(lost))]
