"""The router of replicas: a request goes where the fewest tokens are left to compute.

Job: estimate what each replica would have to compute, from what it has cached and what it already works on.
Owns: what is known of the replicas. Does not know: processes, text.

A replica's cost for a request is the tokens of the prompt that it would compute, and ``LOAD_TOKENS`` for every
completion that it has open; once it has as many as it can run, the prompt would also wait, which counts as all of it
and ``FULL_TOKENS`` more. So a conversation stays where its cache is until that replica is much busier than another.

A replica reports what it has cached from time to time (``refresh``). What was sent to it lately (``RECENT_S``) counts
as cached there too, up to the first chunk of tokens that was new: the turns of a conversation, and prompts with one
system prompt that come together, find each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.engine.prefix_hashes import STEP, chunks_of_hashes, passing

LOAD_TOKENS = 64
FULL_TOKENS = 4096

RECENT_S = 15.0
"""Seconds for which a prompt that was sent counts as cached although the replica has not reported it."""


@dataclass(slots=True)
class Replica:
    """What the router knows of one.

    Attributes:
        is_up: takes requests.
        num_open: completions that it has open.
        reported: prefixes that it says it has.
        sent: prefixes that were sent to it lately, with the moment.
        sent_since: no older ones are in ``sent``.
    """

    is_up: bool = False
    num_open: int = 0
    reported: set[int] = field(default_factory=set)
    sent: dict[int, float] = field(default_factory=dict)
    sent_since: float = 0.0

    def known(self, hashes: list[int]) -> set[int]:
        """Those of the prefixes that it has."""
        return self.reported.intersection(hashes) | (self.sent.keys() & hashes)

    def goes_beyond(self, value: int) -> bool:
        """Whether it may have more than the prefix with this hash, of whole chunks."""
        return value in self.sent or value in self.reported or passing(value) in self.reported

    def forget_sent(self, now: float) -> None:
        """What was sent long ago counts no more."""
        self.sent_since = now - RECENT_S
        self.sent = {value: moment for value, moment in self.sent.items() if moment > self.sent_since}


class NoReplicaError(Exception):
    """No replica takes requests now."""


class Router:
    """Chooses among ``num_replicas``. ``max_num_seqs``: completions that one of them runs at a time."""

    def __init__(self, num_replicas: int, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas = [Replica() for _ in range(num_replicas)]
        self.max_num_seqs = max_num_seqs
        self._clock = clock

    def choose(self, token_ids: Sequence[int], salt: str | None = None) -> int:
        """The replica for a prompt; it counts as sent there.

        Raises:
            NoReplicaError: none is up.
        """
        up = [index for index, replica in enumerate(self.replicas) if replica.is_up]
        if not up:
            raise NoReplicaError
        hashes = self._hashes(token_ids, salt, up)
        cached = self._cached(hashes, up)
        chosen = min(up, key=lambda index: (self._cost(index, len(token_ids) - cached[index], len(token_ids)), index))
        replica, now = self.replicas[chosen], self._clock()
        replica.num_open += 1
        if now - replica.sent_since > 2 * RECENT_S:  # also of a replica that reports nothing
            replica.forget_sent(now)
        replica.sent.update(dict.fromkeys(hashes, now))
        return chosen

    def _hashes(self, token_ids: Sequence[int], salt: str | None, up: list[int]) -> list[int]:
        """Of the prompt's prefixes, up to the end of the first chunk that no replica has whole."""
        hashes: list[int] = []
        for chunk in chunks_of_hashes(token_ids, salt):
            hashes += chunk
            if not any(self.replicas[index].goes_beyond(chunk[-1]) for index in up):
                break
        return hashes

    def _cached(self, hashes: list[int], up: list[int]) -> dict[int, int]:
        """Tokens of the prompt that each replica has, as far as is known."""
        tokens = dict(zip(hashes, range(STEP, STEP * len(hashes) + 1, STEP), strict=True))
        return {index: max(map(tokens.__getitem__, self.replicas[index].known(hashes)), default=0) for index in up}

    def _cost(self, index: int, num_missing: int, num_tokens: int) -> int:
        num_open = self.replicas[index].num_open
        cost = num_missing + LOAD_TOKENS * num_open
        return cost + num_tokens + FULL_TOKENS if num_open >= self.max_num_seqs else cost

    def ended(self, index: int) -> None:
        """A completion on a replica has ended."""
        self.replicas[index].num_open -= 1

    def refresh(self, index: int, reported: Iterable[int]) -> None:
        """A replica reports what it has cached."""
        self.replicas[index].reported = set(reported)
        self.replicas[index].forget_sent(self._clock())

    def forget(self, index: int) -> None:
        """A replica forgets what it has cached."""
        self.replicas[index].reported, self.replicas[index].sent = set(), {}

    def up(self, index: int) -> None:
        """A replica takes requests, with nothing cached."""
        self.replicas[index] = Replica(is_up=True)

    def down(self, index: int) -> None:
        """A replica takes no requests any more; those that it has end or go elsewhere."""
        self.replicas[index].is_up = False
