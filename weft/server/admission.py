"""Admission control: how many completions the server accepts at a time.

Completions are counted from the moment a call is accepted until its response has ended.
"""

from collections.abc import Callable
from mmap import mmap

from weft.errors import RequestError
from weft.server.errors import ApiError

RETRY_AFTER_S = 1


class OpenCounts:
    """Numbers of open completions per process, in memory that all processes map. A process writes its own number.

    Args:
        memory: eight bytes for each process; None: there is one process.
        index: this process's place.
    """

    def __init__(self, memory: mmap | bytearray | None = None, index: int = 0) -> None:
        self._places = memoryview(bytearray(8) if memory is None else memory).cast("q")
        self._index = index

    def add(self, count: int) -> None:
        """Note that this process has opened ``count`` completions, or closed them (negative)."""
        self._places[self._index] += count

    def forget(self, index: int) -> None:
        """Forget the completions of a process that has ended."""
        self._places[index] = 0

    @property
    def total(self) -> int:
        return sum(self._places)


class Admission:
    """A bounded queue: ``max_running`` completions run, ``max_waiting`` more may wait.

    Several processes look at the sum of what they have open, without a lock: if two accept a call in the same moment,
    the queue is longer by one call.
    """

    def __init__(self, max_running: int, max_waiting: int, counts: OpenCounts | None = None) -> None:
        self.limit = max_running + max_waiting
        self._counts = counts or OpenCounts()

    @property
    def num_open(self) -> int:
        return self._counts.total

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
        num_open = self.num_open
        if num_open + count > self.limit:
            raise ApiError(
                429,
                f"{num_open} completions are running or waiting; this server takes {self.limit}; try again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self._counts.add(count)
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._counts.add(-count)

        return leave
