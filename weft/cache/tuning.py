"""Tuning of the eviction policy by replaying requests against the cache alone.

Job: run whole requests through a ``Manager`` and count what they would have computed. Every finished request is
replayed on shadow caches (managers of the same sizes, which hold token ids only), one per candidate weight of FLOP
efficiency against recency. The policy follows the candidate that saves most. Does not know: tensors, schedulers,
concurrency (replayed requests run one after another).

Marconi (arXiv 2411.19379) tunes its ``alpha`` by replaying recent requests over a grid. Here the replay is spread over
time: each request is replayed once per candidate after its end, one request per step, after a launch. No step waits for
a long search. Nothing is replayed before the first eviction, since no choice was made before.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cache.manager import EndedRequest, Manager
from weft.cache.nodes import Tokens, as_tokens
from weft.cache.policy import FlopAware


@dataclass(slots=True)
class ReplayCounts:
    """Sums over replayed requests, in tokens and FLOPs."""

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
    """Run one request to its end: prefill in one step, then the rest of ``token_ids``.

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
        counts.num_prompt_tokens += len(prompt)
        counts.num_reused_tokens += reused
        counts.flops_saved += manager.spec.prefill_flops(0, reused)
    return reused


logger = logging.getLogger(__name__)

CANDIDATES = (0.0, 1.0, 4.0, 16.0, 64.0)
INTERVAL = 16
"""Requests between two decisions."""
MEMORY = 0.9
"""Share of the saved FLOPs that is kept after each decision, so that the choice follows the load."""
MARGIN = 1.02
"""Factor by which another candidate must have saved more."""


class AlphaTuner:
    """Set the ``alpha`` of a manager's policy. Attach it with ``manager.observer = AlphaTuner(manager)``."""

    def __init__(self, manager: Manager) -> None:
        assert isinstance(manager.evictor.policy, FlopAware)
        self._manager = manager
        self._policy = manager.evictor.policy
        self._shadows: dict[float, tuple[Manager, ReplayCounts]] = {}
        self._num_seen = 0

    def __call__(self, ended: EndedRequest) -> None:
        """Replay a request that has ended on every shadow cache."""
        if not self._shadows:
            stats = self._manager.stats()
            if not stats.num_evicted_pages + stats.num_evicted_states:
                return
            self._shadows = {alpha: (self._make_shadow(alpha), ReplayCounts()) for alpha in CANDIDATES}
        tokens, num_prompt_tokens, salt, boundaries = ended
        for shadow, counts in self._shadows.values():
            replay_request(shadow, tokens, num_prompt_tokens, salt=salt, boundaries=boundaries, counts=counts)
        self._num_seen += 1
        if self._num_seen % INTERVAL == 0:
            self._decide()

    def _make_shadow(self, alpha: float) -> Manager:
        real = self._manager
        return Manager(
            real.spec,
            num_pages=real.pages.num_pages,
            num_slots=real.slots.num_slots,
            enable_prefix_caching=True,
            checkpoint_policy=real.checkpoint_policy,
            eviction=FlopAware(alpha),
        )

    def _decide(self) -> None:
        saved = {alpha: counts.flops_saved for alpha, (_, counts) in self._shadows.items()}
        best = max(saved, key=lambda alpha: saved[alpha])
        if saved[best] > MARGIN * saved.get(self._policy.alpha, 0.0):
            logger.debug("eviction: alpha %g instead of %g", best, self._policy.alpha)
            self._policy.set_alpha(best)
        for _, counts in self._shadows.values():
            counts.flops_saved *= MEMORY
