"""Nodes of the prefix tree: spans of tokens with pages and states, and the longest stored prefix of a sequence.

Does not know: how nodes are inserted and removed (``radix_tree``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CheckpointKind = Literal["divergence", "boundary", "inside", "end"]
"""The reason for a state. ``inside``: the prompt's end less one, and every 4,096 tokens."""

Tokens = NDArray[np.uint32] | NDArray[np.int64]
"""Token ids: uint32, the memory of the prompt itself. A prompt with images has int64, with a negative id of the image
at each of its placeholders (``weft/multimodal/items.py``)."""


def as_tokens(token_ids: Sequence[int] | Tokens) -> Tokens:
    """Token ids as a numpy array: an array is returned without a copy, other sequences become int64."""
    if isinstance(token_ids, (np.ndarray, array)):
        return np.asarray(token_ids)
    return np.frombuffer(array("q", token_ids), dtype=np.int64)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that ``a`` and ``b`` share. One vectorised comparison, no loop over tokens."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    different = a[:length] != b[:length]
    first = int(different.argmax())
    return first if different[first] else length


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A recurrent state in ``slot``, after the first ``position`` tokens of the path.

    ``pins`` counts state forks that read the slot and are not launched yet. ``last_used`` is in ticks of the cache. The
    eviction weight follows from ``kind``, ``lineage`` (reuses on the way to this state) and ``num_uses``.
    """

    position: int
    slot: int
    node: Node
    last_used: int
    kind: CheckpointKind = "end"
    lineage: int = 0
    num_uses: int = 0
    pins: int = 0
    attached: bool = True


@dataclass(slots=True, eq=False)
class Node:
    """A span of tokens with its KV pages and checkpoints. ``locks`` counts the leases at or below it.

    A root has no parent, no tokens, and the ``salt`` of the sequences below it. ``page_keys`` belongs to the tier below
    the device: a key for each whole page that ends inside the span, or fewer if they were not needed yet.
    ``lost_states`` (by position) and ``lost_continuations`` (by first token) hold the times of evictions, of
    ``time.monotonic()``.
    """

    parent: Node | None
    start: int
    tokens: Tokens
    pages: list[int]
    last_used: int = 0
    locks: int = 0
    attached: bool = True
    salt: str | None = None
    children: dict[int, Node] = field(default_factory=dict)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    lost_states: dict[int, float] = field(default_factory=dict)
    lost_continuations: dict[int, float] = field(default_factory=dict)
    page_keys: list[bytes] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_evictable_leaf(self) -> bool:
        return self.attached and not self.children and not self.locks and self.parent is not None

    def path(self) -> Iterator[Node]:
        """Yield the node and its ancestors, upwards."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest stored prefix of a sequence: ``num_tokens`` tokens, ending inside or at the end of ``node``."""

    node: Node | None
    num_tokens: int

    def nearest_checkpoint(self, limit: int) -> Checkpoint | None:
        """The latest state on the path at or before ``min(limit, num_tokens)``."""
        limit = min(limit, self.num_tokens)
        for node in self.node.path() if self.node is not None else ():
            best = max((p for p in node.checkpoints if p <= limit), default=None)
            if best is not None:
                return node.checkpoints[best]
        return None
