"""The plan of the drafts that a step verifies.

A request gets as many as its parameters, the step and the cache have room for. Does not know: how drafts are made,
tensors.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from weft.cache.lease import Lease
from weft.cache.manager import Manager
from weft.config.speculation import SpeculativeConfig
from weft.request import Request

logger = logging.getLogger(__name__)

LOG_S, LOG_EVERY = 10.0, 64
"""Seconds between two lines of the log, and verifications between two looks at the clock."""

LOW_RATE = 0.3


class Proposer(Protocol):
    """Proposes drafts. The proposals change the speed, never the tokens."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Return up to ``count`` drafts that follow ``request``'s tokens, all of which are known on the host."""
        ...


class DeviceDrafts:
    """Proposes the drafts that the device made after the previous step."""

    def propose(self, request: Request, count: int) -> list[int]:
        return request.draft_token_ids[:count]


def refusal(request: Request) -> str:
    """Why ``request`` decodes without drafts; empty if it does not."""
    if request.logits_processors:
        return "a logits processor may count on one call per token, and drafts that are rejected take tokens back"
    return ""


class AcceptanceLog:
    """Writes to the log how many drafts were right, at most every ``LOG_S`` seconds; ``reason``: why few may be."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._steps = self._drafted = self._accepted = 0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        self._steps += 1
        self._drafted += num_drafts
        self._accepted += num_accepted
        if self._steps % LOG_EVERY == 0 and time.monotonic() - self._since >= LOG_S:
            rate = self._accepted / self._drafted
            tokens = 1 + self._accepted / self._steps
            why = "" if rate >= LOW_RATE else f"; few: {self._reason}, and rejected drafts only cost time"
            logger.info("drafts: %.0f%% accepted, %.2f tokens per request and step%s", 100 * rate, tokens, why)
            self._begin()


class Drafts(NamedTuple):
    """Drafts of one request and step. The first ``num_proposed`` tokens were proposed, and the rest only fill up."""

    token_ids: list[int]
    num_proposed: int


Decoding = tuple[Request, Lease]


class DraftPlanner:
    """Drafts for the requests of one scheduler.

    Args:
        max_drafts: no request gets more.
        drafts_at: from the requests of a step to the drafts that each of them gets.
        max_model_len: most tokens of a sequence.
        reach: tokens past a step's last one for which the head wants pages. Without pages its drafts are worse.
        on_device: drafts stay on the device, so that a step can follow another before its results are known.
        may_be_none: for some texts nothing is drafted.

    Attributes:
        num_drafts: how often a request's drafts were verified.
        num_draft_tokens, num_accepted_tokens: tokens of these, and how many of them were right.
        accepted_per_position: how often the 1st, 2nd, … draft was right.
    """

    def __init__(
        self,
        proposer: Proposer,
        manager: Manager,
        max_drafts: int,
        drafts_at: Callable[[int], int],
        max_model_len: int,
        reach: int = 0,
        on_device: bool = False,
        may_be_none: bool = False,
        why_few: str = "",
    ) -> None:
        self.proposer, self.max_drafts, self.drafts_at = proposer, max_drafts, drafts_at
        self._manager, self.max_model_len, self.reach, self.on_device = manager, max_model_len, reach, on_device
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * max_drafts
        self.may_be_none, self._log = may_be_none, AcceptanceLog(why_few)

    @classmethod
    def of(cls, config: SpeculativeConfig, manager: Manager, max_model_len: int, *, on_device: bool = False) -> Self:
        count, at, is_head = config.num_speculative_tokens, config.drafts_at, config.method == "mtp"
        why_few = "the model's head guesses these texts badly" if is_head else "outputs repeat little"
        may_be_none = not is_head and config.synthetic_acceptance_rate is None
        reach = count - 1 if is_head else 0
        return cls(DeviceDrafts(), manager, count, at, max_model_len, reach, on_device, may_be_none, why_few)

    def num_drafts_at(self, num_seqs: int) -> int:
        """Drafts of each of ``num_seqs`` requests of a step."""
        return min(self.max_drafts, self.drafts_at(num_seqs))

    def plan(self, decoding: Sequence[Decoding], num_seqs: int, budget: int) -> list[Drafts]:
        """Drafts for requests whose last known token runs in this step; empty if nobody gets any.

        The leases get pages and slots for them. Accepted drafts past ``max_tokens`` are dropped. Requests with fewer
        drafts than others are filled up with arbitrary tokens: steps with equally many drafts per request run faster.

        Args:
            num_seqs: requests in the step, prefills included.
            budget: most drafts in all.
        """
        limit = self.num_drafts_at(num_seqs)
        proposed = []
        for request, lease in decoding:
            self._manager.drafts.trim(lease, limit)
            room = self.room(request, lease, min(limit, budget))
            drafts = self.proposer.propose(request, room) if room > 0 else []
            drafts = drafts[: self._manager.drafts.allocate(lease, request.num_computed_tokens, len(drafts))]
            budget -= len(drafts)
            proposed.append(drafts)
        if not any(proposed):
            return []
        plan = []
        for (request, lease), drafts in zip(decoding, proposed, strict=True):
            token_ids = self._fill_up(request, lease, drafts, min(limit, budget + len(drafts)))
            budget -= len(token_ids) - len(drafts)
            plan.append(Drafts(token_ids, len(drafts)))
        return plan

    def _fill_up(self, request: Request, lease: Lease, drafts: list[int], limit: int) -> list[int]:
        """``drafts`` and any tokens after them, ``limit`` in all if there is room; pages for what the head reads."""
        room = self.room(request, lease, limit)
        if room > len(drafts):
            filler = request.output_token_ids[-1:] * (room - len(drafts))
            drafts = (drafts + filler)[: self._manager.drafts.allocate(lease, request.num_computed_tokens, room)]
        if self.reach:
            end = request.num_computed_tokens + 1 + len(drafts) + self.reach
            self._manager.allocate(lease, min(end, self.max_model_len))
        return drafts

    def make_room(self, request: Request, lease: Lease, count: int) -> bool:
        """Allocate pages and slots for ``count`` drafts of a step that follows a decode. Returns False if there are too
        few, or the request takes fewer drafts."""
        self._manager.drafts.trim(lease, count)
        if self.room(request, lease, count) < count:
            return False
        return self._manager.drafts.allocate(lease, request.num_computed_tokens, count) == count

    def room(self, request: Request, lease: Lease, limit: int) -> int:
        """Most drafts. A prefill stores its states before the first one."""
        start = request.num_computed_tokens
        if start < len(lease.tokens) or request.no_drafts_because:
            return 0
        return min(limit, self.max_model_len - start - 1)

    def stats(self) -> dict[str, Any]:
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": {str(i): n for i, n in enumerate(self.accepted_per_position)},
        }

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count a verification in which the first ``num_accepted`` of ``num_drafts`` drafts were right."""
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
        self._log.count(num_drafts, num_accepted)
