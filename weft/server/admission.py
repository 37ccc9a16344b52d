"""How much the server takes on.

Job: count completions from the moment a call is accepted until its response has ended, and refuse what is too much.
Owns: the count. Does not know: what the engine does with them.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.errors import RequestError
from weft.server.errors import ApiError

RETRY_AFTER_S = 1


class Admission:
    """A bounded queue: ``max_running`` completions run, ``max_waiting`` more may wait."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.limit = max_running + max_waiting
        self.num_open = 0

    def enter(self, count: int) -> Callable[[], None]:
        """Take on ``count`` completions. Returns what to call, once, when their response has ended.

        Raises:
            RequestError: they could never fit.
            ApiError: 429, the queue is full now.
        """
        if count > self.limit:
            raise RequestError(
                f"{count} completions in one call are more than this server takes ({self.limit}); lower n or send "
                "fewer prompts",
                "n",
            )
        if self.num_open + count > self.limit:
            raise ApiError(
                429,
                f"{self.num_open} completions are running or waiting, and the queue ends at {self.limit}; "
                "try again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_open += count
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self.num_open -= count

        return leave
