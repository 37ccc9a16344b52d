"""The order of copies on the streams of a GPU, without one: every use of memory happens after the use before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.runner import host_link
from weft.runner.host_link import CudaLink

Clock = dict[int, int]


class Streams:
    """``torch.cuda`` as far as ``CudaLink`` uses it. Every stream has a vector clock."""

    def __init__(self) -> None:
        self.count = 0
        self.current = self.Stream()

    def Stream(self, *_: Any) -> Any:
        self.count += 1
        name, clock = self.count, dict[int, int]()

        def wait_event(event: Any) -> None:
            for each, count in event.clock.items():
                clock[each] = max(clock.get(each, 0), count)

        stream = SimpleNamespace(name=name, clock=clock, wait_event=wait_event)
        stream.wait_stream = lambda other: wait_event(SimpleNamespace(clock=dict(other.clock)))
        return stream

    def Event(self, **_: Any) -> Any:
        event = SimpleNamespace(clock={}, query=lambda: True, elapsed_time=lambda other: 1.0)
        event.record = lambda stream=None: setattr(event, "clock", dict((stream or self.current).clock))
        return event

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def use(self) -> Clock:
        """Queue something on the current stream. Returns its clock."""
        clock = self.current.clock
        clock[self.current.name] = clock.get(self.current.name, 0) + 1
        return {self.current.name: clock[self.current.name]}

    def is_after(self, use: Clock) -> bool:
        """Whether what is queued now on the current stream begins after a use has ended."""
        return all(self.current.clock.get(name, 0) >= count for name, count in use.items())


class Memory:
    """Host memory that says when it is copied."""

    shape = (8, 4)

    def __init__(self, streams: Streams, uses: list[tuple[str, Clock]]) -> None:
        self.streams, self.uses = streams, uses

    def __getitem__(self, places: slice) -> Any:
        copied = self.streams.current
        self.uses.append((f"link {copied.name}", self.streams.use()))
        return torch.zeros(places.stop - places.start, 4, dtype=torch.uint8)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    fake = SimpleNamespace(
        cuda=made, empty=lambda *size, dtype, device: torch.empty(*size, dtype=dtype), uint8=torch.uint8
    )
    monkeypatch.setattr(host_link, "torch", fake)
    return made


def test_a_restore_waits_for_the_steps_before_it(streams: Streams) -> None:
    link = CudaLink(torch.device("cpu"), 16)
    memory: Any = Memory(streams, [])
    step, scatters = streams.use(), list[Clock]()
    for number in (1, 2):
        with link.restoring(number, after=0):
            for _ in range(3):
                link.to_device(memory, [0, 1])
                assert streams.is_after(step), "a step in flight may use the pages"
                assert all(map(streams.is_after, scatters)), "staging memory has rows that were not scattered"
                scatters.append(streams.use())
    assert not any(map(streams.is_after, scatters)), "steps do not wait for restores"
    link.wait_for([1])
    assert streams.is_after(scatters[2]) and not streams.is_after(scatters[-1])


def test_a_restore_reads_what_a_store_has_written(streams: Streams) -> None:
    link = CudaLink(torch.device("cpu"), 16)
    uses: list[tuple[str, Clock]] = []
    memory: Any = Memory(streams, uses)
    with link.storing(1):
        gathered = streams.use()
        link.to_host(link.rows(2, memory), memory, [0, 1])
    stored = uses[-1][1]
    with link.restoring(2, after=1):
        link.to_device(memory, [0, 1])
        assert streams.is_after(gathered) and streams.is_after(stored)


def test_a_late_rank_waits_for_its_own_copies(streams: Streams) -> None:
    """Rank 0 has stored the entry already, so the restore names no store."""
    link = CudaLink(torch.device("cpu"), 16)
    uses: list[tuple[str, Clock]] = []
    memory: Any = Memory(streams, uses)
    with link.storing(1):
        link.to_host(link.rows(2, memory), memory, [0, 1])
    stored = uses[-1][1]
    with link.restoring(2, after=0):
        link.to_device(memory, [0, 1])
        assert not streams.is_after(stored), "rank 0 has nothing to wait for"
    earlier, before = list[Any](link.mark()), list(uses)
    with link.restoring(3, after=0, earlier=earlier):
        link.to_device(memory, [0, 1])
        assert streams.is_after(stored)
    for _, use in before:  # in both directions
        assert any(all(event.clock.get(name, 0) >= count for name, count in use.items()) for event in earlier)
