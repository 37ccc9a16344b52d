"""The other API processes of the same engine, as one of them sees them.

Job: the interface by which their counts come together. Owns: it. Does not know: what is counted, how processes talk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Peers(Protocol):
    """All API processes, this one included."""

    def offer(self, report: Callable[[str], bytes]) -> None:
        """``report`` gives what this process has counted under a name, when any of them asks."""

    async def ready(self) -> None:
        """This process could take calls; returns when all could, so that no caller meets one that cannot."""

    async def gather(self, what: str) -> list[bytes]:
        """The reports of all; of one that does not answer or has died, the last one that it gave."""


class NoPeers:
    """There is one process."""

    def __init__(self) -> None:
        self._report: Callable[[str], bytes] = lambda what: b""

    def offer(self, report: Callable[[str], bytes]) -> None:
        self._report = report

    async def ready(self) -> None:
        pass

    async def gather(self, what: str) -> list[bytes]:
        return [self._report(what)]
