"""Where recurrent states are stored.

Job: choose the positions of a prefill, and of decoding, at which a state is kept. Owns: the three policies.
Does not know: slots, trees, or whether a chosen checkpoint finds room.

* ``exact``: any position. The divergence from what is stored, turn boundaries, the prompt's end less one, every
  4,096 tokens; at the end of the request the working state itself.
* ``aligned``: multiples of the recurrent layers' chunk length only. The same divergence and prompt end rounded down;
  while decoding a snapshot at each multiple, of which the last is kept.
* ``finish_only``: nothing but the working state at the end of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

CheckpointPolicy = Literal["exact", "aligned", "finish_only"]
CheckpointKind = Literal["divergence", "boundary", "inside", "end"]
"""Why a state stands where it stands; ``inside``: the prompt's end less one, and every 4,096 tokens."""

MAX_CHECKPOINTS = 4
"""States that the prefill of one request stores at most."""
STRIDE = 4096
"""Tokens between the checkpoints inside a very long prompt."""


def prefill_positions(
    policy: CheckpointPolicy,
    *,
    reused: int,
    divergence: int | None,
    boundaries: Sequence[int],
    num_prompt_tokens: int,
    alignment: int,
) -> list[int]:
    """Positions at which the prefill of a prompt stores a state, ascending.

    Args:
        reused: tokens whose state is reused; nothing is stored at or before it.
        divergence: where the prompt leaves what is stored, if no state stands there.
        boundaries: turn boundaries, in any order.
        num_prompt_tokens: tokens of the prompt.
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


def is_decode_position(policy: CheckpointPolicy, position: int, alignment: int) -> bool:
    """Does a decoding request take a snapshot after ``position`` tokens?"""
    return policy == "aligned" and position % alignment == 0
