"""Gathering metrics and reports of all API processes.

Job: ask each, wait for what they say but not for ever, remember what those said that have died. Owns: the reports on
their way. Does not know: what is in them, how they travel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from weft.server import api_link as link

PATIENCE_S = 1.0
"""How long a process may take to report; then what it said last counts."""

Answer = Callable[[int, link.Gathered], None]
"""Takes the index of the process that asked, and the answer."""


@dataclass(slots=True)
class _Asked:
    """One gathering: who asked, under which number, for what, and who has not reported."""

    index: int
    number: int
    what: str
    answer: Answer
    missing: set[int]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Gathering:
    """All that are under way.

    A process that dies takes with it what it had counted; its last report stays, so that sums do not fall.
    """

    _asked: dict[int, _Asked] = field(default_factory=dict)
    _last: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _retired: dict[str, list[bytes]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(
        self, index: int, message: link.Gather, members: Collection[int], answer: Answer
    ) -> list[tuple[int, link.Report]]:
        """Process ``index`` asks. Returns what to send to which process; ``answer`` is called later."""
        number = next(self._numbers)
        asked = self._asked[number] = _Asked(index, message.number, message.what, answer, set(members))
        asked.timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._finish, number)
        return [(member, link.Report(number, message.what)) for member in members]

    def reported(self, index: int, message: link.Reported) -> None:
        asked = self._asked.get(message.number)
        if asked is None:
            return  # too late
        self._last.setdefault(asked.what, {})[index] = message.content
        self._is_there(message.number, index)

    def retire(self, index: int) -> None:
        """This process has died."""
        for what, last in self._last.items():
            if index in last:
                self._retired.setdefault(what, []).append(last.pop(index))
        for number in list(self._asked):
            self._is_there(number, index)

    def _is_there(self, number: int, index: int) -> None:
        asked = self._asked[number]
        asked.missing.discard(index)
        if not asked.missing:
            self._finish(number)

    def _finish(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        if asked.timer is not None:
            asked.timer.cancel()
        reports = [*self._last.get(asked.what, {}).values(), *self._retired.get(asked.what, ())]
        asked.answer(asked.index, link.Gathered(asked.number, reports))
