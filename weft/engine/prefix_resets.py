"""Reset of the prefix caches of several replicas, with one answer for all of them."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _PendingReset:
    """A reset without an answer so far. ``waiting``: replicas that have not answered."""

    waiting: set[int]
    done: bool


class PrefixResets:
    """Answers resets in the order of the calls, each after all its replicas have answered or died.

    Args:
        answer: called with whether all replicas dropped their prefixes.
    """

    def __init__(self, answer: Callable[[bool], None]) -> None:
        self._answer = answer
        self._pending: deque[_PendingReset] = deque()

    def ask(self, replicas: Iterable[int], done: bool = True) -> None:
        """Note that a reset was sent to these replicas. ``done`` is False if it was sent to none, since it is
        impossible now."""
        self._pending.append(_PendingReset(set(replicas), done))
        self._notify()

    def answered(self, replica: int, done: bool) -> None:
        """Note that a replica has answered its oldest reset."""
        reset = next((r for r in self._pending if replica in r.waiting), None)
        if reset is not None:
            reset.waiting.discard(replica)
            reset.done &= done
            self._notify()

    def died(self, replica: int) -> None:
        """Note that a replica died, and its cache with it."""
        for reset in self._pending:
            reset.waiting.discard(replica)
        self._notify()

    def _notify(self) -> None:
        while self._pending and not self._pending[0].waiting:
            self._answer(self._pending.popleft().done)
