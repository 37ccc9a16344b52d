"""Detection of preemption loops, in which no new token is computed."""

import logging

from weft.request import Request

logger = logging.getLogger(__name__)


class StallDetector:
    """Counts progress, and preemptions without any.

    Attributes:
        num_new_tokens: tokens that were computed for the first time, over all requests.
        num_stalls: preemptions after which no new token had been computed since the request's preemption before.
    """

    def __init__(self) -> None:
        self.num_new_tokens = self.num_stalls = 0

    def preempted(self, request: Request) -> None:
        """Report a stall if nothing new was computed since ``request`` was preempted before.

        The known tokens of running requests have pages before another request is admitted, so only tokens that were
        never computed before can lead to a preemption.
        """
        if request.progress_when_preempted == self.num_new_tokens:
            self.num_stalls += 1
            if self.num_stalls.bit_count() == 1:  # the 1st, 2nd, 4th, …: endless stalls must not fill the disk
                logger.error(
                    "%s is preempted again at %d of %d tokens, and no request has computed a new token since then: "
                    "the engine goes round in circles (%d times so far); please report this with its settings",
                    request.request_id, request.num_computed_tokens, request.num_tokens, self.num_stalls,
                )  # fmt: skip
        request.progress_when_preempted = self.num_new_tokens
