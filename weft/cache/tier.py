"""The interface between the device's cache and a tier below it.

Job: what the cache offers to a tier, and what a lookup finds there. Does not know: where a tier keeps anything, keys,
copies.
"""

from typing import Any, Protocol

import msgspec

from weft.cache.nodes import Checkpoint, CheckpointKind, Node, Prefix, Tokens


class Below(msgspec.Struct, frozen=True):
    """A prefix whose KV and state can be restored together.

    Attributes:
        num_tokens: length of the prefix on the device after the restore.
        num_shared_tokens: its leading tokens whose KV is on the device already.
        pages: entries of the tier for the whole pages after these tokens, in order.
        state: entry of the state after ``num_tokens`` tokens, with the KV of the last partial page; None if the model
            has no recurrent layers.
        kind: the reason for which the state was stored.
        refused: the reason why the prefix is computed again instead; empty if it is restored.
        compute_s: seconds that computing it would take; None if nothing was measured yet.
        is_pending: whether the lookup goes on in a later step. Nothing is known before that.
    """

    num_tokens: int
    num_shared_tokens: int
    pages: list[Any]
    state: Any = None
    kind: CheckpointKind = "end"
    num_bytes: int = 0
    refused: str = ""
    compute_s: float | None = None
    is_pending: bool = False


class Tier(Protocol):
    """A tier below the device. Entries that leave the device are offered before their memory is used again."""

    def kv_leaves(self, leaf: Node, end: int) -> None:
        """The KV of ``leaf`` from position ``end`` on is evicted."""
        ...

    def state_leaves(self, checkpoint: Checkpoint) -> None:
        """A state is evicted, or becomes the working state of a request."""
        ...

    def reused(self, node: Node, num_tokens: int, checkpoint: Checkpoint | None) -> None:
        """A request reuses ``num_tokens`` tokens of the path to ``node``."""
        ...

    def look_up(self, tokens: Tokens, salt: str | None, prefix: Prefix, num_tokens: int) -> Below | None:
        """Find a prefix that is longer than the ``num_tokens`` reusable ones on the device. Changes nothing.

        Args:
            prefix: the longest prefix whose KV is on the device.
        """
        ...

    def held(self, node: Node) -> tuple[int, list[int]]:
        """The number of whole pages that end inside a node's span and are in the tier, and positions of states of the
        node, present or evicted, that are there."""
        ...

    def forget(self, tokens: Tokens, salt: str | None) -> None:
        """Drop every prefix of ``tokens``, because its content is not to be trusted."""
        ...

    def clear(self) -> None: ...
