"""Graphs of one function, one per size: captured largest first within a memory budget, replayed by size.

Job: the capture of a list of sizes, the replay of one of them, and in debug mode the check that nothing that the graphs
read has moved. Owns: the captured graphs, their outputs, counters. Does not know: what the function computes, which
size a batch runs in.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from weft.graph.graph import Graph, GraphPool, capture
from weft.processes.collector import collector_off, objects_frozen

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Signature = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]
"""Shape, strides, dtype, address."""


class Recorder(Protocol[T_co]):
    """How the function of a set is run and captured for a size, from static memory."""

    def warm_up(self, size: int) -> object:
        """Run the work of a replay once: that may tune kernels and allocate workspaces, which a capture cannot."""
        ...

    def record(self, size: int) -> tuple[Graph, T_co]:
        """Capture it. Returns the graph, and the static memory of its results."""
        ...


class FunctionRecorder(Generic[T]):
    """Captures all of ``function(size)`` as one graph of ``pool``."""

    def __init__(self, function: Callable[[int], T], pool: GraphPool) -> None:
        self.warm_up, self._pool = function, pool

    def record(self, size: int) -> tuple[Graph, T]:
        return capture(self._pool, lambda: self.warm_up(size))


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Settings that all sets of one engine share.

    Attributes:
        device: where the function runs.
        keep_gc: leave the garbage collector on during capture.
        watched: debug mode: the tensors that the graphs read, by name, as they are now; every replay checks that none
            has moved since the capture.
        show_progress: a progress bar with the free memory.
        least: the least of a number over all processes that capture together, so that they capture the same sizes.
    """

    device: torch.device
    keep_gc: bool = False
    watched: Callable[[], Mapping[str, Tensor]] | None = None
    show_progress: bool = True
    least: Callable[[int], int] = int


@dataclass(slots=True)
class GraphCounters:
    """Totals since the start.

    Attributes:
        replays: steps that ran as a graph.
        missed: steps of the kind that fitted none of these graphs.
        rows, padding_rows: rows replayed, and how many of them were padding.
        capture_seconds: time that capturing took, runs before it included.
        capture_bytes: device memory that the graphs hold (0 on the CPU).
    """

    captures: int = 0
    replays: int = 0
    missed: int = 0
    rows: int = 0
    padding_rows: int = 0
    capture_seconds: float = 0.0
    capture_bytes: int = 0


class GraphSet(Generic[T]):
    """Captured graphs by size.

    Args:
        what: named on the progress bar and in messages, for example "decode graphs".
        recorder: of the function.
        sizes: to capture.
        warm_every_size: run each size before its capture, and not only the largest and the smallest: for functions that
            decide something at the first run of a size. Kernels are compiled and loaded before (``runner/warmup.py``).
        budget_bytes: device memory that the graphs may hold; sizes are captured largest first, and the rest is left out
            with a message when it is used up. None: no limit.

    Attributes:
        sizes: captured, ascending.
    """

    def __init__(
        self,
        what: str,
        recorder: Recorder[T],
        sizes: Sequence[int],
        options: CaptureOptions,
        budget_bytes: int | None = None,
        *,
        warm_every_size: bool = False,
    ) -> None:
        self.counters = GraphCounters()
        self._graphs: dict[int, tuple[Graph, T]] = {}
        self._watched = options.watched
        started = time.perf_counter()
        warmed = set(sizes) if warm_every_size else {min(sizes), max(sizes)}
        with _frozen_gc(enabled=not options.keep_gc):
            self._capture_all(what, recorder, sorted(sizes, reverse=True), warmed, options, budget_bytes)
        self.sizes = sorted(self._graphs)
        self._captured_with = _signatures(self._watched()) if self._watched is not None else {}
        self.counters.captures = len(self.sizes)
        self.counters.capture_seconds = time.perf_counter() - started

    def _capture_all(
        self,
        what: str,
        recorder: Recorder[T],
        sizes: list[int],
        warmed: set[int],
        options: CaptureOptions,
        budget: int | None,
    ) -> None:
        device = options.device
        with tqdm(sizes, desc=f"Capturing {what}", disable=not options.show_progress, dynamic_ncols=True) as bar:
            for size in bar:
                used = self.counters.capture_bytes
                if budget is not None and options.least(budget - used) < 0:
                    left = [s for s in sizes if s <= size]
                    logger.warning("%s hold %d MiB, the budget is used up: none for sizes %s", what, used >> 20, left)
                    return
                if size in warmed:
                    recorder.warm_up(size)
                before = reserved_bytes(device)
                self._graphs[size] = recorder.record(size)
                self.counters.capture_bytes += reserved_bytes(device) - before
                bar.set_postfix_str(_free_text(device), refresh=False)

    def graph(self, size: int) -> Graph:
        return self._graphs[size][0]

    def results(self, size: int) -> T:
        """Return the memory to which a replay of a captured size writes its results."""
        return self._graphs[size][1]

    def replay(self, size: int, num_rows: int) -> T:
        """Run the graph of ``size``, of which ``num_rows`` rows are real.

        Returns:
            Its results, valid until the next replay of any graph of the pool.

        Raises:
            RuntimeError: in debug mode, a tensor that is not where the capture read it.
        """
        if self._watched is not None:
            _check_unmoved(self._captured_with, _signatures(self._watched()))
        graph, results = self._graphs[size]
        graph.replay()
        self.counters.replays += 1
        self.counters.rows += size
        self.counters.padding_rows += size - num_rows
        return results


def reserved_bytes(device: torch.device) -> int:
    """Return the device memory that this process holds for tensors, in bytes; 0 on the CPU.

    Its growth across a capture is the graph's memory. Warm-ups allocate from the common pool instead, which every other
    step reuses.
    """
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _free_text(device: torch.device) -> str:
    """Free device memory for a progress bar; empty on the CPU."""
    if device.type != "cuda":
        return ""
    return f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free"


@contextmanager
def _frozen_gc(enabled: bool) -> Iterator[None]:
    """No garbage collection in the body: a tensor freed in the middle of a capture would spoil it."""
    if not enabled:
        yield
        return
    with objects_frozen(), collector_off():  # torch collects by itself when it begins a capture
        yield


def _signatures(tensors: Mapping[str, Tensor]) -> dict[str, Signature]:
    return {name: (tuple(t.shape), t.stride(), t.dtype, t.data_ptr()) for name, t in tensors.items()}


def _check_unmoved(then: Mapping[str, Signature], now: Mapping[str, Signature]) -> None:
    for name, before in then.items():
        if name not in now:
            raise RuntimeError(f"the captured graphs read {name}, which is gone")
        if now[name] == before:
            continue
        what = zip(("shape", "strides", "dtype", "address"), before, now[name], strict=True)
        changes = ", ".join(f"{part} {old} is now {new}" for part, old, new in what if old != new)
        raise RuntimeError(
            f"{name} is not the tensor that the captured graphs read ({changes}); copy into the static tensor"
        )
