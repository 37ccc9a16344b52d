"""Which drafts a step verifies.

Job: ask the proposer for drafts of a decoding request, as many as its parameters, the step and the cache have room for;
count what became of them. Owns: the proposer and the counters. Does not know: how drafts are made, tensors.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from weft.cache.lease import Lease
from weft.cache.manager import Manager
from weft.config.speculation import SpeculativeConfig
from weft.request import Request
from weft.speculation.ngram import NgramProposer

logger = logging.getLogger(__name__)

LOG_S, LOG_EVERY = 10.0, 64
"""Seconds between two lines of the log, and verifications between two looks at the clock."""

LOW_RATE = 0.3


class Proposer(Protocol):
    """Guesses what comes next. What it guesses changes the speed, never the tokens."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Up to ``count`` tokens that may follow the known tokens of ``request``, all of which are known."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        ...


class Synthetic:
    """Always proposes as many tokens as are wanted, for measurements in which right drafts are a matter of chance."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def propose(self, request: Request, count: int) -> list[int]:
        drafts = self._proposer.propose(request, count)
        missing, prompt = count - len(drafts), request.prompt_token_ids
        start = request.num_computed_tokens * count  # other tokens in every step
        return drafts + [prompt[(start + i) % len(prompt)] for i in range(missing)]

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)


class ModelDrafts:
    """Proposes what the model's own head guessed in the step before."""

    def propose(self, request: Request, count: int) -> list[int]:
        return request.draft_token_ids[:count]

    def forget(self, request_id: str) -> None:
        """Its guesses lie with the request."""


def refusal(request: Request) -> str:
    """Why ``request`` decodes without drafts; empty if it does not."""
    if request.logits_processors:
        return "a logits processor is called with the tokens before one position, and a step with drafts has several"
    if request.sampling.grammar is not None:
        return "a grammar gives the mask of one position, and a step with drafts has several"
    return ""


class AcceptanceLog:
    """Writes to the log how many drafts were right, at most every ``LOG_S`` seconds."""

    def __init__(self) -> None:
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
            why = "" if rate >= LOW_RATE else "; few: outputs repeat little, and rejected drafts only cost time"
            logger.info("drafts: %.0f%% accepted, %.2f tokens per request and step%s", 100 * rate, tokens, why)
            self._begin()


class DraftPlanner:
    """Drafts for the requests of one scheduler.

    Args:
        reach: tokens past a step's last one for which the head wants pages; where there are none, it guesses worse.

    Attributes:
        num_drafts: how often a request's drafts were verified.
        num_draft_tokens, num_accepted_tokens: tokens of these, and how many of them were right.
        accepted_per_position: how often the 1st, 2nd, … draft was right.
    """

    def __init__(
        self, proposer: Proposer, manager: Manager, max_drafts: int, max_model_len: int, reach: int = 0
    ) -> None:
        self.proposer, self.max_drafts = proposer, max_drafts
        self._manager, self._max_model_len, self._reach = manager, max_model_len, reach
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * max_drafts
        self._log = AcceptanceLog()

    @classmethod
    def of(cls, config: SpeculativeConfig, manager: Manager, max_model_len: int) -> DraftPlanner:
        """As configured."""
        count = config.num_speculative_tokens
        if config.method == "mtp":
            return cls(ModelDrafts(), manager, count, max_model_len, reach=count - 1)
        proposer: Proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        if config.synthetic_acceptance_rate is not None:
            proposer = Synthetic(proposer)
        return cls(proposer, manager, count, max_model_len)

    def plan(self, request: Request, lease: Lease, budget: int) -> list[int]:
        """Drafts for a request whose last known token runs in this step; at most ``budget``.

        The lease gets pages and slots for them. What is accepted past ``max_tokens`` is dropped.
        """
        room = self._room(request, lease, budget)
        drafts = self.proposer.propose(request, room) if room > 0 else []
        return drafts[: self._manager.allocate_drafts(lease, request.num_computed_tokens, len(drafts))]

    def fill_up(self, request: Request, lease: Lease, drafts: list[int], budget: int) -> list[int]:
        """Any tokens behind ``drafts``, at most ``budget``, so that all requests of a step bring equally many tokens,
        which runs faster than different numbers of them."""
        room = self._room(request, lease, budget + len(drafts))
        if room > len(drafts):
            filler = request.output_token_ids[-1:] * (room - len(drafts))
            drafts = (drafts + filler)[: self._manager.allocate_drafts(lease, request.num_computed_tokens, room)]
        if self._reach:
            end = request.num_computed_tokens + 1 + len(drafts) + self._reach
            self._manager.allocate(lease, min(end, self._max_model_len))
        return drafts

    def _room(self, request: Request, lease: Lease, budget: int) -> int:
        """Most drafts. A prefill stores its states before the first one."""
        start = request.num_computed_tokens
        if start < len(lease.tokens) or request.no_drafts_because:
            return 0
        return min(self.max_drafts, budget, self._max_model_len - start - 1)

    def stats(self) -> dict[str, Any]:
        """Fields of ``SchedulerStats``."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_num_accepted_tokens_per_pos": {str(i): n for i, n in enumerate(self.accepted_per_position)},
        }

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` drafts of ``request`` the first ``num_accepted`` were right."""
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
        self._log.count(num_drafts, num_accepted)
