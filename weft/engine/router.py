"""The router of replicas. A request goes to the replica with the fewest tokens left to compute.

Job: estimate the tokens to compute on each replica, from the replica's cache and open requests. Owns: what is known of
the replicas. Does not know: processes, text.

The cost of a request on a replica is the number of prompt tokens to compute, plus ``LOAD_TOKENS`` for every open
completion there. A token that the replica would restore from the tier below its device counts at its price. If the
replica runs as many completions as it can, the prompt would have to wait. It then costs all its tokens and
``FULL_TOKENS`` more. A conversation therefore stays where its cache is, until that replica is much busier than another
one.

A replica reports from time to time what it has cached (``refresh``). Prompts sent to it within ``RECENT_S`` count as
cached as well, up to the first new chunk of tokens. The turns of a conversation thus go to the same replica, and so do
simultaneous prompts with one system prompt.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.engine.prefix_hashes import STEP, chunks_of_hashes, passing

LOAD_TOKENS = 64
FULL_TOKENS = 4096

RECENT_S = 15.0
"""Seconds for which a sent prompt counts as cached although the replica has not reported it."""


@dataclass(slots=True)
class Replica:
    """The router's knowledge of one replica.

    Attributes:
        is_up: whether it accepts requests.
        reported: hashes of prefixes that it reported.
        below: hashes of prefixes that it would restore.
        price: cost of restoring a token there, as a share of the cost of computing it.
        sent: hashes of recently sent prefixes, each with the time of sending.
        sent_since: lower bound on the times in ``sent``.
    """

    is_up: bool = False
    num_open: int = 0
    reported: set[int] = field(default_factory=set)
    below: set[int] = field(default_factory=set)
    price: float = 1.0
    sent: dict[int, float] = field(default_factory=dict)
    sent_since: float = 0.0

    def known(self, hashes: list[int]) -> set[int]:
        """The subset of the prefixes that the replica has."""
        return self.reported.intersection(hashes) | (self.sent.keys() & hashes)

    def goes_beyond(self, value: int) -> bool:
        """Whether the replica may have whole chunks beyond the prefix with this hash."""
        return value in self.sent or any({value, passing(value)} & known for known in (self.reported, self.below))

    def expire_sent(self, now: float) -> None:
        """Drop prefixes that were sent too long ago."""
        self.sent_since = now - RECENT_S
        self.sent = {value: moment for value, moment in self.sent.items() if moment > self.sent_since}


class NoReplicaError(Exception):
    """Raised when no replica accepts requests."""


class Router:
    """Choose among ``num_replicas``. ``max_num_seqs``: number of completions that a replica runs at a time."""

    def __init__(self, num_replicas: int, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas = [Replica() for _ in range(num_replicas)]
        self.max_num_seqs = max_num_seqs
        self._clock = clock

    def choose(self, token_ids: Sequence[int], salt: str | None = None) -> int:
        """Choose the replica for a prompt, which then counts as sent there.

        Raises:
            NoReplicaError: no replica is up.
        """
        up = [index for index, replica in enumerate(self.replicas) if replica.is_up]
        if not up:
            raise NoReplicaError
        hashes = self._hashes(token_ids, salt, up)
        cached = self._cached(hashes, up)
        chosen = min(up, key=lambda index: (self._cost(index, len(token_ids) - cached[index], len(token_ids)), index))
        replica, now = self.replicas[chosen], self._clock()
        replica.num_open += 1
        if now - replica.sent_since > 2 * RECENT_S:  # also for a replica that reports nothing
            replica.expire_sent(now)
        replica.sent.update(dict.fromkeys(hashes, now))
        return chosen

    def _hashes(self, token_ids: Sequence[int], salt: str | None, up: list[int]) -> list[int]:
        """Hashes of the prompt's prefixes, up to the end of the first chunk that no replica has whole."""
        hashes: list[int] = []
        for chunk in chunks_of_hashes(token_ids, salt):
            hashes += chunk
            if not any(self.replicas[index].goes_beyond(chunk[-1]) for index in up):
                break
        return hashes

    def _cached(self, hashes: list[int], up: list[int]) -> dict[int, float]:
        """Number of prompt tokens that each replica has, as known. Tokens below a device count less."""
        tokens = dict(zip(hashes, range(STEP, STEP * len(hashes) + 1, STEP), strict=True))
        found: dict[int, float] = {}
        for index in up:
            replica = self.replicas[index]
            found[index] = on_device = max(map(tokens.__getitem__, replica.known(hashes)), default=0)
            if replica.below:
                restored = max(map(tokens.__getitem__, replica.below.intersection(hashes)), default=0)
                found[index] += (1.0 - replica.price) * max(0, restored - on_device)
        return found

    def _cost(self, index: int, num_missing: float, num_tokens: int) -> float:
        num_open = self.replicas[index].num_open
        cost = num_missing + LOAD_TOKENS * num_open
        return cost + num_tokens + FULL_TOKENS if num_open >= self.max_num_seqs else cost

    def ended(self, index: int) -> None:
        """Note that a completion on a replica has ended."""
        self.replicas[index].num_open -= 1

    def refresh(self, index: int, reported: Iterable[int], below: Iterable[int] = (), price: float = 1.0) -> None:
        """Note the prefixes that a replica has cached, on its device and below."""
        self.replicas[index].reported, self.replicas[index].below = set(reported), set(below)
        self.replicas[index].price = price
        self.replicas[index].expire_sent(self._clock())

    def reset(self, index: int) -> None:
        """Note that a replica has dropped all its cached prefixes."""
        self.replicas[index].reported, self.replicas[index].below, self.replicas[index].sent = set(), set(), {}

    def up(self, index: int) -> None:
        """Note that a replica accepts requests, with nothing cached."""
        self.replicas[index] = Replica(is_up=True)

    def readmit(self, index: int) -> None:
        """Note that a replica accepts requests again, as before ``down``."""
        self.replicas[index].is_up = True

    def down(self, index: int) -> None:
        """Note that a replica accepts no more requests. Its open requests end or go elsewhere."""
        self.replicas[index].is_up = False
