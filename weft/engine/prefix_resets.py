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
    """Answers, in the order of the questions, each once all who were asked have answered or died.

    Args:
        answer: takes whether all have forgotten everything.
    """

    def __init__(self, answer: Callable[[bool], None]) -> None:
        self._answer = answer
        self._questions: deque[_PendingReset] = deque()

    def ask(self, replicas: Iterable[int], done: bool = True) -> None:
        """These replicas have been asked. ``done`` False: nobody was, since it cannot be done now."""
        self._questions.append(_PendingReset(set(replicas), done))
        self._notify()

    def answered(self, replica: int, done: bool) -> None:
        """A replica has answered the oldest question that it was asked."""
        question = next((q for q in self._questions if replica in q.waiting), None)
        if question is not None:
            question.waiting.discard(replica)
            question.done &= done
            self._notify()

    def died(self, replica: int) -> None:
        """With everything that it had cached."""
        for question in self._questions:
            question.waiting.discard(replica)
        self._notify()

    def _notify(self) -> None:
        while self._questions and not self._questions[0].waiting:
            self._answer(self._questions.popleft().done)
