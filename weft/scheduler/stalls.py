"""Detection of preemption loops, in which no new token is computed."""

from __future__ import annotations

import logging

from weft.request import Request

logger = logging.getLogger(__name__)


class StallDetector:
    """Attributes:
    num_new_tokens: tokens that all requests together have computed for the first time.
    num_stalls: preemptions since whose predecessor nothing new was computed.
    """

    def __init__(self) -> None:
        self.num_new_tokens = self.num_stalls = 0

    def preempted(self, request: Request) -> None:
        """Raise the alarm if nothing new was computed since ``request`` was preempted before: nobody gets any further.

        What is known of the running requests has its pages before another is admitted, so only tokens that were never
        computed before can lead to a preemption.
        """
        if request.progress_when_preempted == self.num_new_tokens:
            self.num_stalls += 1
            if self.num_stalls.bit_count() == 1:  # the 1st, 2nd, 4th, …: a hang must not fill the disk
                logger.error(
                    "%s is preempted again at %d of %d tokens, and no request has computed a new token since then: "
                    "the engine goes round in circles (%d times so far); please report this with its settings",
                    request.request_id, request.num_computed_tokens, request.num_tokens, self.num_stalls,
                )  # fmt: skip
        request.progress_when_preempted = self.num_new_tokens
