"""Fair shares of callers when more requests wait than can run.

Each caller has a counter of the tokens that the engine computed for it: uncached prompt tokens, and output tokens. The
next request to admit belongs to the caller with the smallest sum of its counter and the expected cost of its request.
The expectation only lets a short request pass long ones.

A caller without waiting requests gets no credit. Its next request raises the counter to the virtual time, which is the
counter of a caller with a fair share. (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024;
Goyal et al., Start-time Fair Queueing, 1996.)
"""

MAX_EXPECTED = 512
"""Upper bound on the expected cost of a request, in tokens. Most prompts are partly cached, and most callers do not say
how long the answer will be."""

_MIN_REMEMBERED = 4096


class FairOrder:
    """Counters of callers."""

    def __init__(self) -> None:
        self._time = 0.0
        self._used: dict[str, float] = {}
        self._num_open: dict[str, int] = {}
        self._forget_at = _MIN_REMEMBERED

    def begin(self, caller: str) -> None:
        """Note a new request of ``caller``."""
        self._num_open[caller] = self._num_open.get(caller, 0) + 1
        if len(self._used) >= self._forget_at:
            open_ones = self._num_open
            self._used = {name: used for name, used in self._used.items() if used > self._time or name in open_ones}
            self._forget_at = max(_MIN_REMEMBERED, 2 * len(self._used))

    def wait(self, caller: str) -> None:
        """Note that ``caller`` has a waiting request and had none before."""
        self._used[caller] = max(self._used.get(caller, 0.0), self._time)

    def key(self, caller: str, num_tokens: int) -> float:
        """The sort key of a waiting request with ``num_tokens`` prompt and output tokens; smaller keys go first."""
        return self._used[caller] + min(num_tokens, MAX_EXPECTED)

    def admit(self, caller: str, num_tokens: int) -> None:
        """Note that a request was admitted, of whose prompt ``num_tokens`` tokens have to be computed."""
        self._time = max(self._time, self._used[caller])
        self.charge(caller, num_tokens)

    def charge(self, caller: str, num_tokens: int) -> None:
        """Note that ``num_tokens`` tokens were computed for requests of ``caller``, which may have ended."""
        self._used[caller] += num_tokens
        self._time += num_tokens / max(1, len(self._num_open))

    def end(self, caller: str) -> None:
        self._num_open[caller] -= 1
        if self._num_open[caller] == 0:
            del self._num_open[caller]
