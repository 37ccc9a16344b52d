"""Work beside the main chain of a captured graph: launches on a second stream, which become a branch of the graph.

Job: fork and join. Owns: the second stream of each device. Does not know: what runs there.

The branch starts when all that was launched before it has ended; what is launched after ``join`` waits for both. Memory
that is allocated in the branch belongs to its stream and is used there alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """A branch, until it is joined."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def join(self) -> None:
        """From here on the current stream waits for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def graph_branch(device: torch.device) -> Iterator[Branch]:
    """The body's launches run beside what follows it, up to ``join`` of what this yields. Where there are no streams
    they run in order."""
    if device.type != "cuda":
        yield Branch(None)
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield Branch(stream)
