"""Prefix lookups of waiting requests: what is cached now, or will be after a prefill in flight.

Owns: what is remembered of waiting requests between steps. Does not know: rows, budgets.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.cache.manager import Manager
from weft.cache.match import Match
from weft.cache.nodes import Tokens, as_tokens
from weft.request import Request
from weft.scheduler.queue import SchedulePolicy
from weft.scheduler.running import Running

LPM_WINDOW = 32
"""Number of waiting requests among which ``lpm`` looks for the longest cached prefix."""

MIN_IN_FLIGHT_MATCH = 64
"""Minimum number of tokens that a waiting request must save to wait for a prefill in flight."""


@dataclass(slots=True)
class Lookup:
    """The lookup of one waiting request: the tokens as an array, and the prefill to wait for."""

    tokens: Tokens
    awaited: Running | None = None


class PrefixLookups:
    """Lookups of the waiting requests of one scheduler."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._lookups: dict[Request, Lookup] = {}

    def remove(self, request: Request) -> None:
        """Drop the lookup of a request that does not wait any more."""
        self._lookups.pop(request, None)

    def check(self, waiting: Iterable[Request]) -> None:
        """Assert that every lookup belongs to a waiting request."""
        assert self._lookups.keys() <= set(waiting), "a lookup has outlived its wait"

    def candidates(self, requests: Iterable[Request], policy: SchedulePolicy, step: int) -> Iterable[Request]:
        """Yield waiting ``requests`` in the order in which a step tries them."""
        if policy != "lpm":
            return requests
        rest = iter(requests)
        window = list(itertools.islice(rest, LPM_WINDOW))
        # The oldest goes first from time to time, so that better matches cannot keep it waiting forever.
        oldest_first = step % LPM_WINDOW == 0
        head, window = (window[:1], window[1:]) if oldest_first else ([], window)
        best_first = sorted(window, key=lambda request: -self.match(request).num_tokens)
        return itertools.chain(head, best_first, rest)

    def match(self, request: Request) -> Match:
        """Match the request against the cache as it is now."""
        lookup = self._lookups.get(request)
        if lookup is None:
            lookup = self._lookups[request] = Lookup(as_tokens(request.cache_token_ids))
        wants_all = request.sampling.prompt_logprobs is not None
        prompt = request.num_prompt_tokens
        return self._manager.match(
            lookup.tokens, request.cache_salt, reuse=not wants_all, num_prompt_tokens=prompt
        )  # fmt: skip

    def awaits_prefill(self, request: Request) -> bool:
        """Whether the request waits for a prefill in flight. A prefill that is aborted soon leaves its part in the
        cache."""
        lookup = self._lookups.get(request)
        awaited = lookup.awaited if lookup is not None else None
        return awaited is not None and not awaited.lease.is_prefilled

    def await_in_flight_match(self, request: Request, match: Match, running: Sequence[Running]) -> None:
        """Wait for a prefill in flight if it makes much more of this prompt reusable, and have it store a state."""
        states, least = self._manager.states, match.num_tokens + MIN_IN_FLIGHT_MATCH
        for each in running:
            if position := states.shareable(match, each.lease, least):
                states.share(each.lease, position)
                self._lookups[request].awaited = each
                return
