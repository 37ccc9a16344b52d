"""The offset of another machine's clock, estimated from round trips.

Job: the difference between two monotonic clocks. Owns: the bounds known so far. Does not know: who asks.
"""

from __future__ import annotations

import math


class ClockOffset:
    """Seconds to add to the other machine's ``time.monotonic()`` to get this machine's."""

    def __init__(self) -> None:
        self._low, self._high = -math.inf, math.inf

    def note(self, asked: float, theirs: float, answered: float) -> None:
        """It showed ``theirs`` at some moment between ``asked`` and ``answered`` of this machine's clock."""
        low, high = max(self._low, asked - theirs), min(self._high, answered - theirs)
        if low > high:  # the clocks have drifted apart since
            low, high = asked - theirs, answered - theirs
        self._low, self._high = low, high

    @property
    def seconds(self) -> float:
        """0.0 as long as the clocks may be one, and before the first answer."""
        return 0.0 if self._low <= 0.0 <= self._high else (self._low + self._high) / 2
