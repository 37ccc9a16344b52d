"""Resetting the prefix cache of several replicas: one answer from all of theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _PendingReset:
    """``waiting``: replicas that have not answered."""

    waiting: set[int]
    done: bool


class PrefixResets:
    """Answers, in the order of the calls, each once all who were asked have answered or died.

    Args:
        answer: takes whether all have forgotten everything.
    """

    def __init__(self, answer: Callable[[bool], None]) -> None:
        self._answer = answer
        self._pending: deque[_PendingReset] = deque()

    def ask(self, replicas: Iterable[int], done: bool = True) -> None:
        """These replicas have been asked. ``done`` False: nobody was, since it cannot be done now."""
        self._pending.append(_PendingReset(set(replicas), done))
        self._notify()

    def answered(self, replica: int, done: bool) -> None:
        """A replica has answered the oldest reset that it was asked for."""
        reset = next((r for r in self._pending if replica in r.waiting), None)
        if reset is not None:
            reset.waiting.discard(replica)
            reset.done &= done
            self._notify()

    def died(self, replica: int) -> None:
        """With everything that it had cached."""
        for reset in self._pending:
            reset.waiting.discard(replica)
        self._notify()

    def _notify(self) -> None:
        while self._pending and not self._pending[0].waiting:
            self._answer(self._pending.popleft().done)
