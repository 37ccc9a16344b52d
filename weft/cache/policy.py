"""Eviction policies: a utility for every state and every KV tail. Entries with a larger utility are kept longer.

A policy computes utilities from last use, FLOPs saved and memory taken.

``lru`` is recency alone. ``flops`` adds the FLOPs that an entry saves per byte, after Marconi (arXiv 2411.19379):
``utility = recency + alpha x FLOP efficiency``. Efficiency is marginal to the nearest surviving ancestor state, because
a reuse would start there if the entry were gone. All states have one size, so FLOPs per byte of state is FLOPs saved up
to a factor; KV is weighed per token. Recency is in ticks of the cache's clock (one per admission).

Efficiency is scaled by the *horizon*, the age at which entries are evicted: ``alpha = 1`` gives the most efficient
recent entry one horizon of extra life. Recency and efficiency then span the same range, as in the paper.
"""

from typing import Protocol


class EvictionPolicy(Protocol):
    """Utilities are comparable within one kind (states, or KV) and one ``epoch``."""

    epoch: int
    """A number that changes when all utilities have to be computed again."""

    def state_utility(self, last_used: int, flops_saved: float) -> float:
        """The utility of a checkpoint that saves ``flops_saved`` over the nearest ancestor state."""
        ...

    def kv_utility(self, last_used: int, flops_saved_per_token: float) -> float:
        """The utility of the last stretch of a leaf's KV."""
        ...

    def observe_eviction(self, age: int) -> None:
        """Note that an entry unused for ``age`` ticks was evicted."""
        ...


class LRU:
    """Evict the least recently used entry first."""

    epoch = 0

    def state_utility(self, last_used: int, flops_saved: float) -> float:
        return last_used

    def kv_utility(self, last_used: int, flops_saved_per_token: float) -> float:
        return last_used

    def observe_eviction(self, age: int) -> None:
        pass


class FlopAware:
    """Weigh recency plus ``alpha`` times FLOP efficiency."""

    RESCALE = 1.25
    """Utilities are recomputed when horizon or scale have moved by more than this factor."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha
        self.epoch = 0
        self._horizon = 0.0
        self._largest_state = self._largest_kv = 0.0
        self._weights = (0.0, 0.0)

    def set_alpha(self, alpha: float) -> None:
        if alpha != self.alpha:
            self.alpha = alpha
            self._reweigh(force=True)

    def state_utility(self, last_used: int, flops_saved: float) -> float:
        self._largest_state = max(self._largest_state, flops_saved)
        return last_used + self._weights[0] * flops_saved

    def kv_utility(self, last_used: int, flops_saved_per_token: float) -> float:
        self._largest_kv = max(self._largest_kv, flops_saved_per_token)
        return last_used + self._weights[1] * flops_saved_per_token

    def observe_eviction(self, age: int) -> None:
        # A slow average, since the horizon is a property of load and memory, not of single evictions.
        self._horizon += (age - self._horizon) / (64 if self._horizon else 1)
        self._reweigh()

    def _reweigh(self, force: bool = False) -> None:
        scale = self.alpha * self._horizon
        weights = tuple(scale / largest if largest else 0.0 for largest in (self._largest_state, self._largest_kv))
        if force or any(_moved(old, new, self.RESCALE) for old, new in zip(self._weights, weights, strict=True)):
            self._weights = (weights[0], weights[1])
            self.epoch += 1


class ReuseOdds:
    """The odds that a state is used (again), learned from similar states.

    Similar states have the same kind, the same number of reuses on the way to them, and the same number of uses (both
    counted up to 2). Examples are the state at the end of a conversation's third answer, or a branch point that was hit
    once.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], int] = {}
        self._used: dict[tuple[str, int, int], int] = {}

    def add(self, kind: str, lineage: int, num_uses: int) -> None:
        """Count a new state with ``num_uses`` uses."""
        key = _alike(kind, lineage, num_uses)
        self._seen[key] = self._seen.get(key, 0) + 1

    def use(self, kind: str, lineage: int, num_uses: int) -> None:
        """Count a use of a state that had ``num_uses`` uses before."""
        key = _alike(kind, lineage, num_uses)
        self._used[key] = self._used.get(key, 0) + 1
        self.add(kind, lineage, num_uses + 1)

    def __call__(self, kind: str, lineage: int, num_uses: int) -> float:
        """Expected share of states that are used again: 1 while nothing is known, and never 0."""
        key = _alike(kind, lineage, num_uses)
        return min(1.0, (self._used.get(key, 0) + PRIOR) / (self._seen.get(key, 0) + PRIOR))


PRIOR = 4
"""Weight of the initial assumption that states are used, in states."""


def _alike(kind: str, lineage: int, num_uses: int) -> tuple[str, int, int]:
    return kind, min(lineage, 2), min(num_uses, 2)


def _moved(old: float, new: float, factor: float) -> bool:
    return not (old / factor <= new <= old * factor)


def make_policy(name: str) -> LRU | FlopAware:
    assert name in ("lru", "flops"), f"unknown eviction policy {name!r}"
    return LRU() if name == "lru" else FlopAware()
