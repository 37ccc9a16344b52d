"""Replaying a log of requests against the cache alone, to see what a setting would have reused.

Job: run whole requests through a ``Manager`` and count what they would have computed. Owns: nothing that outlives a
replay. Does not know: tensors, time, concurrency (requests run one after another).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cache.manager import Manager
from weft.cache.nodes import Tokens, as_tokens


@dataclass(slots=True)
class ReplayCounts:
    """Sums over replayed requests, in tokens and FLOPs."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    flops_saved: float = 0.0


def replay_request(
    manager: Manager,
    token_ids: Sequence[int] | Tokens,
    num_prompt_tokens: int,
    *,
    salt: str | None = None,
    boundaries: Sequence[int] = (),
    counts: ReplayCounts | None = None,
) -> int:
    """Run one request to its end: prefill in one step, then the rest of ``token_ids``, all of it fed.

    Returns:
        The prompt tokens reused.
    """
    tokens = as_tokens(token_ids)
    prompt = tokens[:num_prompt_tokens]
    lease = manager.lease(manager.match(prompt, salt), boundaries=boundaries)
    assert lease is not None, "a request alone fits"
    reused = lease.num_cached_tokens
    for start, end in ((reused, len(prompt)), (len(prompt), len(tokens))):
        if end > start and manager.allocate(lease, end) is not None:
            manager.allocate_checkpoints(lease, start, end - start)
            manager.commit(lease, end)
            manager.confirm(lease, end)
    manager.release(lease, tokens[: lease.num_committed_tokens])
    if counts is not None:
        counts.num_requests += 1
        counts.num_prompt_tokens += len(prompt)
        counts.num_reused_tokens += reused
        counts.flops_saved += manager.spec.prefill_flops(0, reused)
    return reused
