"""Fair queueing of callers (self-clocked) when more requests arrive than the engine can take.

Each request gets its place, so that callers get equal shares of the engine and a short call does not wait for all the
long ones that came before it.

The place of a request is where it would be done if every caller had an engine as fast as its share: behind its caller's
earlier ones, or behind what is being served now, by the tokens that it asks for. The scheduler serves by place, as it
otherwise does by arrival. (Golestani, A Self-Clocked Fair Queueing Scheme for Broadband Applications, 1994.)
"""

from __future__ import annotations

MAX_COST = 512
"""Tokens beyond which requests count as equally long: most do not say how long they will be."""

_MAX_CALLERS = 4096


class FairOrder:
    """Places of requests, ascending; equal ones keep their order of arrival."""

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[str, int] = {}

    def place(self, caller: str, num_tokens: int) -> int:
        """The place of a new request, by the tokens that it asks for and those of its images."""
        place = max(self._now, self._last.get(caller, 0)) + min(num_tokens, MAX_COST)
        if len(self._last) >= _MAX_CALLERS:  # callers whose last place is past are like new ones
            self._last = {caller: last for caller, last in self._last.items() if last > self._now}
        self._last[caller] = place
        return place

    def served(self, place: int) -> None:
        """A request has got its first token."""
        self._now = max(self._now, place)
