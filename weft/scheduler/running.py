"""Records of the scheduler: running requests, plans, launched steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from weft.cache.lease import Lease
from weft.cache.nodes import Tokens
from weft.request import Request


@dataclass(slots=True, eq=False)
class Running:
    """A request that holds a row and a lease. ``in_flight`` launched steps use them.

    Attributes:
        failed: a step computed NaN for it, so the cache keeps nothing of it.
        retries: it leaves to wait again, and will be computed anew without drafts.
    """

    request: Request
    row: int
    lease: Lease
    in_flight: int = 0
    announced: bool = False
    num_pages_sent: int = 0
    failed: bool = False
    retries: bool = False

    def cache_tokens(self) -> Tokens:
        """The request's tokens on the host, as the prefix cache knows them. The lease has most of them as an array
        already; converting a long prompt takes longer than everything else at a request's end."""
        leased, request = self.lease.tokens, self.request
        generated = request.output_token_ids[len(leased) - request.num_prompt_tokens :]
        return np.concatenate([leased, np.array(generated, leased.dtype)]) if generated else leased


EMPTY: list[Any] = []
"""An empty list shared by all requests of all steps, so never changed."""


class Planned(msgspec.Struct, gc=False):  # created for every request of every step
    """One request's part of the next step: ``num_tokens`` tokens, drafts included. The first ``num_proposed`` drafts
    were proposed, the others are padding (``ON_DEVICE``: unknown). ``follows`` as in ``ScheduledRequest``."""

    running: Running
    num_tokens: int
    drafts: list[int] = EMPTY
    num_proposed: int = 0
    follows: bool = False


class Launched(msgspec.Struct, gc=False):
    """One request's part of a launched step: whether it samples, and the number of tokens fed after it. The last
    ``num_drafts`` of these are drafts, if accepted, of which ``num_proposed`` were proposed."""

    running: Running
    samples: bool
    num_tokens: int
    num_drafts: int = 0
    num_proposed: int = 0
