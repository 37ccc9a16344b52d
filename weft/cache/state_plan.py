"""Which states are to be stored: by a prefill, for itself or for a request that waits for it, and while decoding.

Job: apply the checkpoint policy to leases. Owns: nothing of its own. Does not know: slots, when a step is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.cache.checkpoints import CheckpointKind, CheckpointPolicy, is_decode_position, prefill_positions
from weft.cache.lease import Lease, LeaseCheckpoints
from weft.cache.match import Match
from weft.cache.nodes import common_prefix
from weft.cache.spec import CacheSpec


class StatePlan:
    """Args: those of ``Manager``; ``keeps``: there is a prefix cache."""

    def __init__(self, spec: CacheSpec, policy: CheckpointPolicy, *, keeps: bool) -> None:
        self._needs_state, self._alignment = spec.has_states, spec.alignment
        self._policy: CheckpointPolicy = policy
        self._keeps = keeps and spec.has_states

    @property
    def at_multiples(self) -> bool:
        """Whether a decoding request keeps states at certain positions, where a step has to end (``aligned``)."""
        return self._keeps and self._policy == "aligned"

    @property
    def alignment(self) -> int:
        """Tokens between these positions."""
        return self._alignment

    def takes_snapshot(self, position: int) -> bool:
        """Does a decoding request keep its state after ``position`` tokens?"""
        return self._keeps and is_decode_position(self._policy, position, self._alignment)

    def plan(self, match: Match, num_prompt_tokens: int, boundaries: Sequence[int]) -> LeaseCheckpoints:
        """Where the prefill stores states, and why."""
        if not self._keeps:
            return LeaseCheckpoints()
        stored, reused = match.num_kv_tokens, match.num_tokens
        kinds: dict[int, CheckpointKind] = dict.fromkeys(boundaries, "boundary")
        if reused < stored:
            kinds[stored] = "divergence"
        positions = prefill_positions(
            self._policy,
            reused=reused,
            divergence=stored if reused < stored < len(match.tokens) else None,
            boundaries=boundaries,
            num_prompt_tokens=num_prompt_tokens,
            alignment=self._alignment,
        )
        return LeaseCheckpoints(positions, kinds, match.checkpoint.lineage + 1 if match.checkpoint is not None else 0)

    def shareable(self, match: Match, lease: Lease) -> int:
        """How many tokens of ``match`` a running prefill makes reusable once it is confirmed. Changes nothing."""
        if lease.is_inserted or lease.node is None or lease.salt != match.salt or not match.reuse:
            return 0
        shared = min(common_prefix(match.tokens, lease.tokens), len(match.tokens) - 1)
        if not self._needs_state:
            return shared
        positions = [p for p in lease.checkpoints.pending() if p <= shared]
        return shared if self._can_store(lease, shared) else max(positions, default=0)

    def share(self, match: Match, lease: Lease) -> None:
        """Let a running prefill store a state where ``match`` leaves it, if it has not come that far."""
        position = self.shareable(match, lease)
        if self._needs_state and position not in lease.checkpoints.pending() and self._can_store(lease, position):
            lease.checkpoints.add(position, "divergence")

    def _can_store(self, lease: Lease, position: int) -> bool:
        is_ahead = position > lease.num_committed_tokens
        return self._policy == "exact" and lease.checkpoints.has_room and is_ahead
