"""The positions at which recurrent states are stored, by prefills and while decoding.

Job: apply the three checkpoint policies to leases. Does not know: slots, trees, when a step is launched, or whether a
chosen checkpoint finds a slot.

* ``exact``: any position. The divergence from stored prefixes, turn boundaries, the prompt's end less one, and every
  4,096 tokens. At the end of the request the working state itself.
* ``aligned``: multiples of the recurrent layers' chunk length only. The same divergence and prompt end, rounded down.
  While decoding a snapshot at each multiple, of which the last is kept.
* ``finish_only``: the working state at the end of the request, and nothing else.
"""

from collections.abc import Sequence
from typing import Literal

from weft.cache.lease import MAX_CHECKPOINTS, Lease, LeaseCheckpoints
from weft.cache.match import Match
from weft.cache.nodes import CheckpointKind, common_prefix
from weft.cache.reuse_grid import ReuseGrid
from weft.cache.spec import CacheSpec

CheckpointPolicy = Literal["exact", "aligned", "finish_only"]

STRIDE = 4096
"""Tokens between the checkpoints inside a very long prompt."""


class StatePlan:
    """The plan of one manager.

    Args:
        keeps: whether the manager has a prefix cache. The others are arguments of ``Manager``. With a grid, states are
            stored at its points alone, by prefills alone.

    Attributes:
        at_multiples: a decoding request stores states at multiples of ``alignment``, where a step has to end
            (``aligned``).
        alignment: tokens between these positions.
    """

    def __init__(
        self, spec: CacheSpec, policy: CheckpointPolicy, *, keeps: bool, grid: ReuseGrid | None = None
    ) -> None:
        self._needs_state, self.alignment = spec.has_states, spec.alignment if grid is None else grid.size
        self._policy: CheckpointPolicy = "aligned" if grid is not None and policy == "exact" else policy
        self._grid = grid
        self._keeps = keeps and spec.has_states
        self.at_multiples = self._keeps and policy == "aligned" and grid is None

    def takes_snapshot(self, position: int) -> bool:
        """Whether a decoding request stores its state after ``position`` tokens."""
        return self.at_multiples and position % self.alignment == 0

    def plan(self, match: Match, num_prompt_tokens: int, boundaries: Sequence[int]) -> LeaseCheckpoints:
        """Choose the positions at which a prefill stores states, each with its reason."""
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
            num_prompt_tokens=num_prompt_tokens if self._grid is None else num_prompt_tokens - 1,
            alignment=self.alignment,
        )
        return LeaseCheckpoints(positions, kinds, match.checkpoint.lineage + 1 if match.checkpoint is not None else 0)

    def shareable(self, match: Match, lease: Lease, least: int = 1) -> int:
        """Number of tokens of ``match`` that a running prefill makes reusable once confirmed; 0 if fewer than
        ``least``. Changes nothing."""
        if lease.is_inserted or lease.node is None or lease.salt != match.salt or not match.reuse:
            return 0
        tokens, theirs = match.tokens, lease.tokens
        most = min(len(tokens) - 1, len(theirs))
        if least > most or tokens[least - 1] != theirs[least - 1]:
            return 0  # comparing one token rules out most prefills, of which there may be hundreds
        shared = min(common_prefix(tokens, theirs), most)
        if self._needs_state and not self._can_store(lease, shared):
            shared = max((p for p in lease.checkpoints.pending() if p <= shared), default=0)
        return shared if shared >= least else 0

    def share(self, lease: Lease, position: int) -> None:
        """Make a running prefill store a state at ``position``, from ``shareable``, unless it has passed that
        position."""
        if self._needs_state and position not in lease.checkpoints.pending() and self._can_store(lease, position):
            lease.checkpoints.add(position, "divergence")

    def _can_store(self, lease: Lease, position: int) -> bool:
        is_ahead = position > lease.num_committed_tokens
        return self._policy == "exact" and lease.checkpoints.has_room and is_ahead


def prefill_positions(
    policy: CheckpointPolicy,
    *,
    reused: int,
    divergence: int | None,
    boundaries: Sequence[int],
    num_prompt_tokens: int,
    alignment: int,
) -> list[int]:
    """The positions at which the prefill of a prompt stores a state, ascending.

    Args:
        reused: number of tokens whose state is reused. Nothing is stored at or before it.
        divergence: the position at which the prompt diverges from stored prefixes, if it has no state.
        boundaries: turn boundaries, in any order.
        alignment: tokens between the positions of ``aligned``.
    """
    if policy == "finish_only":
        return []
    latest_first = sorted(boundaries, reverse=True)
    wanted = [*([divergence] if divergence is not None else []), *latest_first[:1], num_prompt_tokens - 1]
    wanted += latest_first[1:]
    wanted += range((num_prompt_tokens - 1) // STRIDE * STRIDE, 0, -STRIDE)
    if policy == "aligned":
        wanted = [p // alignment * alignment for p in wanted]
    chosen = [p for p in dict.fromkeys(wanted) if reused < p <= num_prompt_tokens]
    return sorted(chosen[:MAX_CHECKPOINTS])
