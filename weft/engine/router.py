"""Which replica gets a request: the one where least is left to do.

Job: estimate what each replica would have to compute, from what it has cached and what it already works on.
Owns: what is known of the replicas. Does not know: processes, text.

A replica's cost for a request is the tokens of the prompt that it would compute, and ``LOAD_TOKENS`` for every
completion that it has open; once it has as many as it can run, the prompt would also wait, which counts as all of it
and ``FULL_TOKENS`` more. So a conversation stays where its cache is until that replica is much busier than another.

What a replica has cached it tells itself from time to time (``refresh``). Until it does, what was sent to it counts as
cached there: the turns of a conversation, and prompts with one system prompt that come together, find each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weft.engine.prefix_hashes import STEP, prefix_hashes

LOAD_TOKENS = 64
FULL_TOKENS = 4096

_MASK = 2**18 - 1

RECENT_S = 15.0
"""Seconds for which a prompt that was sent counts as cached although the replica does not tell of it (yet)."""


@dataclass(slots=True)
class Replica:
    """What the router knows of one.

    Attributes:
        is_up: takes requests.
        num_open: completions that it has open.
        told: prefixes that it says it has.
        sent: prefixes that were sent to it lately, with the moment.
    """

    is_up: bool = False
    num_open: int = 0
    told: set[int] = field(default_factory=set)
    sent: dict[int, float] = field(default_factory=dict)


class NoReplicaError(Exception):
    """No replica takes requests now."""


class Router:
    """Chooses among ``num_replicas``. ``max_num_seqs``: completions that one of them runs at a time."""

    def __init__(self, num_replicas: int, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas = [Replica() for _ in range(num_replicas)]
        self.max_num_seqs = max_num_seqs
        self._clock = clock
        self._owners: dict[int, int] = {}  # prefix -> replicas that have it, a bit each
        self._present = np.zeros(_MASK + 1, dtype=np.uint32)  # prefixes in ``_owners`` by their lowest bits

    def choose(self, token_ids: list[int], salt: str | None = None, positions: Iterable[int] = ()) -> int:
        """The replica for a prompt; it counts as sent there.

        Args:
            positions: where the prompt's turns end, besides the end of the prompt.

        Raises:
            NoReplicaError: none is up.
        """
        up = [index for index, replica in enumerate(self.replicas) if replica.is_up]
        if not up:
            raise NoReplicaError
        hashes = prefix_hashes(token_ids, salt)
        cached = self._cached(hashes, up)
        chosen = min(up, key=lambda index: (self._cost(index, len(token_ids) - cached[index], len(token_ids)), index))
        now, replica = self._clock(), self.replicas[chosen]
        replica.num_open += 1
        ends = {len(token_ids) - 1, len(token_ids), *positions, *range(STEP, len(token_ids), STEP)}
        for value in hashes[[p - 1 for p in ends if 0 < p <= len(token_ids)]].tolist():
            replica.sent[value] = now
            self._add(value, chosen)
        return chosen

    def _cached(self, hashes: NDArray[np.uint64], up: list[int]) -> dict[int, int]:
        """Tokens of the prompt that each replica has, as far as is known."""
        cached = dict.fromkeys(up, 0)
        (places,) = self._present[hashes & np.uint64(_MASK)].nonzero()  # of the few that may be known
        for place, value in zip(places.tolist(), hashes[places].tolist(), strict=True):
            owned = self._owners.get(value, 0)
            for index in up:
                if owned >> index & 1:
                    cached[index] = place + 1
        return cached

    def _cost(self, index: int, num_missing: int, num_tokens: int) -> int:
        num_open = self.replicas[index].num_open
        cost = num_missing + LOAD_TOKENS * num_open
        return cost + num_tokens + FULL_TOKENS if num_open >= self.max_num_seqs else cost

    def ended(self, index: int) -> None:
        """A completion on a replica has ended."""
        self.replicas[index].num_open -= 1

    def refresh(self, index: int, told: Iterable[int]) -> None:
        """A replica tells what it has cached."""
        replica, limit = self.replicas[index], self._clock() - RECENT_S
        before = replica.told | replica.sent.keys()
        replica.told = set(told)
        replica.sent = {value: moment for value, moment in replica.sent.items() if moment > limit}
        self._own(index, before, replica.told | replica.sent.keys())

    def _own(self, index: int, before: set[int], now: set[int]) -> None:
        """A replica had some prefixes and has others now."""
        for value in before - now:
            self._owners[value] &= ~(1 << index)
            if not self._owners[value]:
                del self._owners[value]
                self._present[value & _MASK] -= 1
        for value in now - before:
            self._add(value, index)

    def _add(self, value: int, index: int) -> None:
        owned = self._owners.get(value, 0)
        self._owners[value] = owned | 1 << index
        if not owned:
            self._present[value & _MASK] += 1

    def up(self, index: int) -> None:
        """A replica takes requests, with nothing cached."""
        before = self.replicas[index]
        self._own(index, before.told | before.sent.keys(), set())
        self.replicas[index] = Replica(is_up=True)

    def down(self, index: int) -> None:
        """A replica takes no requests any more; those that it has end or go elsewhere."""
        self.replicas[index].is_up = False
