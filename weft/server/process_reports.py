"""Reports of all API processes of an engine: metrics and history, brought together.

Job: the interface by which one process requests all reports; request each report, wait for a limited time, and keep
the last reports of processes that died. Owns: the pending requests. Does not know: the content of reports, and their
transport.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from weft.server import api_link as link


class ApiProcesses(Protocol):
    """All API processes of one engine, as seen by one of these processes."""

    def offer(self, report: Callable[[str], bytes]) -> None:
        """Register ``report``, which returns what this process has counted under a name."""

    async def ready(self) -> None:
        """Note that this process accepts calls, and wait until all processes do."""

    async def gather(self, what: str) -> list[bytes]:
        """Collect the reports of all processes. The last report stands for a process that is silent or has died."""


class SingleProcess:
    """The only API process of its engine."""

    def __init__(self) -> None:
        self._report: Callable[[str], bytes] = lambda what: b""

    def offer(self, report: Callable[[str], bytes]) -> None:
        self._report = report

    async def ready(self) -> None:
        pass

    async def gather(self, what: str) -> list[bytes]:
        return [self._report(what)]


PATIENCE_S = 1.0
"""How long a process may take to report; then what it said last counts."""

Answer = Callable[[int, link.Gathered], None]
"""Takes the index of the process that asked, and the answer."""


@dataclass(slots=True)
class _Asked:
    """A request for reports: the process that asked, its number and subject, and the processes still missing."""

    index: int
    number: int
    what: str
    answer: Answer
    missing: set[int]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class ReportGatherer:
    """All gatherings under way, in the main process.

    The last report of a process that died is kept, so that sums do not fall.
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
        if asked is None or index not in asked.missing:
            return  # too late: others have got the answer, or the process has died and is counted
        self._last.setdefault(asked.what, {})[index] = message.content
        self._is_there(message.number, index)

    def retire(self, index: int) -> None:
        """Keep the last figures of a process that has died."""
        for what, last in self._last.items():
            if index in last:
                self._retired.setdefault(what, []).append(last.pop(index))
        for number, asked in list(self._asked.items()):
            if asked.index == index:  # its successor asked nothing, and counts from zero
                self._drop(number)
            else:
                self._is_there(number, index)

    def _is_there(self, number: int, index: int) -> None:
        asked = self._asked[number]
        asked.missing.discard(index)
        if not asked.missing:
            self._finish(number)

    def _finish(self, number: int) -> None:
        asked = self._drop(number)
        reports = [*self._last.get(asked.what, {}).values(), *self._retired.get(asked.what, ())]
        asked.answer(asked.index, link.Gathered(asked.number, reports))

    def _drop(self, number: int) -> _Asked:
        asked = self._asked.pop(number)
        if asked.timer is not None:
            asked.timer.cancel()
        return asked
