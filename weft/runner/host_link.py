"""The link between device memory and the tier's memory on the host: rows of bytes in both directions.

Job: copy staged rows, and say which copies are done. Owns: staging memory on the device, two streams, the events of
copies in flight. Does not know: caches, records.

On a GPU rows are gathered into a staging buffer in the stream of the steps. That is quick, and the step may overwrite
the pages afterwards. A second stream copies the buffer to the host. Restores use a third stream and hold back no step::

    store     steps' stream:  gather ──event──▶ second stream: copy to the host
    restore   third stream:   copy to the device, scatter ──event──▶ steps that use the pages

On the CPU every copy is done at once.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Bytes of a staging buffer, unless one record is larger."""

NUM_STORE_BUFFERS = 8
"""Staging buffers of copies to the host. A step waits for the host only if it evicts more than they hold."""

MAX_UNREPORTED = 4096
"""Upper bound on finished copies that are remembered on a rank that nobody asks."""

Finished = list[tuple[int, float]]
"""Numbers of copies, and their seconds."""


class DirectLink:
    """Copies on the CPU."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self) -> None:
        self._finished: deque[tuple[int, float]] = deque(maxlen=MAX_UNREPORTED)

    @contextmanager
    def storing(self, number: int) -> Iterator[None]:
        """Run the body, which is the copy ``number`` to the host."""
        began = time.perf_counter()
        yield
        self._finished.append((number, time.perf_counter() - began))

    @contextmanager
    def restoring(self, number: int, after: int, earlier: Sequence[torch.cuda.Event] = ()) -> Iterator[None]:
        """Run the body, which is the copy ``number`` from the host. It reads the results of the store ``after`` and of
        the copies ``earlier``."""
        with self.storing(number):
            yield

    def rows(self, count: int, memory: Tensor) -> Tensor:
        """Return staging memory for ``count`` records, as wide as ``memory``."""
        return torch.empty(count, memory.shape[1], dtype=torch.uint8)

    def to_host(self, rows: Tensor, memory: Tensor, places: Sequence[int]) -> None:
        """Copy staged rows to ascending places of ``memory``."""
        memory[torch.tensor(places)] = rows

    def to_device(self, memory: Tensor, places: Sequence[int]) -> Tensor:
        """Copy ascending places of ``memory`` to staging memory, which is valid until the next call."""
        return memory[torch.tensor(places)]

    def wait_for(self, restored: Sequence[int]) -> None:
        """Let the step use the results of these restores."""

    def wait(self) -> None:
        """Wait for the oldest restore in flight."""

    def mark(self) -> list[torch.cuda.Event]:
        """The ends of all copies so far."""
        return []

    def finished(self) -> Finished:
        """The copies that are done, each once."""
        finished = list(self._finished)
        self._finished.clear()
        return finished


@dataclass(slots=True)
class _Copy:
    number: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    is_restore: bool


class CudaLink:
    """Copies on a GPU; ``DirectLink`` describes the methods.

    Args:
        chunk_bytes: bytes of a staging buffer.
    """

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_STORE_BUFFERS + 1)]
        *self._store_buffers, self._restore_buffer = buffers
        self._read = [torch.cuda.Event() for _ in self._store_buffers]
        self._next = itertools.cycle(range(NUM_STORE_BUFFERS))
        self._buffer = 0
        self._copying: _Copy | None = None
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_flight: deque[_Copy] = deque()
        self._ends: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def storing(self, number: int) -> Iterator[None]:
        copy = self._copying = self._begin(number, is_restore=False)
        yield
        self._end(copy, self._down)

    @contextmanager
    def restoring(self, number: int, after: int, earlier: Sequence[torch.cuda.Event] = ()) -> Iterator[None]:
        # A step in flight may still use the pages and slots, and gathers of this step read them.
        self._up.wait_stream(torch.cuda.current_stream())
        if after in self._ends:
            self._up.wait_event(self._ends[after])
        for event in earlier:
            self._up.wait_event(event)
        copy = self._begin(number, is_restore=True)
        copy.begin.record(self._up)
        with torch.cuda.stream(self._up):
            yield
        self._end(copy, self._up)

    def _begin(self, number: int, *, is_restore: bool) -> _Copy:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        return _Copy(number, *events, is_restore)

    def _end(self, copy: _Copy, stream: torch.cuda.Stream) -> None:
        copy.end.record(stream)
        self._ends[copy.number] = copy.end
        self._in_flight.append(copy)
        while len(self._in_flight) > MAX_UNREPORTED:
            self._ends.pop(self._in_flight.popleft().number, None)

    def rows(self, count: int, memory: Tensor) -> Tensor:
        self._buffer = next(self._next)
        torch.cuda.current_stream().wait_event(self._read[self._buffer])
        return self._view(self._store_buffers[self._buffer], count, memory)

    def _view(self, buffer: Tensor, count: int, memory: Tensor) -> Tensor:
        return buffer[: count * memory.shape[1]].view(count, memory.shape[1])

    def to_host(self, rows: Tensor, memory: Tensor, places: Sequence[int]) -> None:
        gathered = torch.cuda.Event()
        gathered.record()
        self._down.wait_event(gathered)
        if self._copying is not None:  # the first rows of a copy: from here on the link is busy
            self._copying.begin.record(self._down)
            self._copying = None
        with torch.cuda.stream(self._down):
            for row, place, length in runs(places):
                memory[place : place + length].copy_(rows[row : row + length], non_blocking=True)
            self._read[self._buffer].record()

    def to_device(self, memory: Tensor, places: Sequence[int]) -> Tensor:
        rows = self._view(self._restore_buffer, len(places), memory)
        for row, place, length in runs(places):
            rows[row : row + length].copy_(memory[place : place + length], non_blocking=True)
        return rows

    def wait_for(self, restored: Sequence[int]) -> None:
        for number in restored:
            end = self._ends.pop(number, None)
            if end is not None:
                torch.cuda.current_stream().wait_event(end)
                self._down.wait_event(end)  # its places may be filled again

    def wait(self) -> None:
        restore = next((copy for copy in self._in_flight if copy.is_restore), None)
        if restore is not None:
            restore.end.synchronize()

    def mark(self) -> list[torch.cuda.Event]:
        events = [torch.cuda.Event() for _ in range(2)]
        for event, stream in zip(events, (self._down, self._up), strict=True):
            event.record(stream)
        return events

    def finished(self) -> Finished:
        done = [copy for copy in self._in_flight if copy.end.query()]
        if not done:
            return []
        numbers = {copy.number for copy in done}
        self._in_flight = deque(copy for copy in self._in_flight if copy.number not in numbers)
        for copy in done:
            if not copy.is_restore:
                self._ends.pop(copy.number, None)
        return [(copy.number, copy.begin.elapsed_time(copy.end) / 1e3) for copy in done]


def runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(index, place, length)`` of each run of consecutive places."""
    begin = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield begin, places[begin], index - begin
            begin = index
