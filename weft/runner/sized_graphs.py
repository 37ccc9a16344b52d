"""Full graphs of one function of a step, one per size.

Job: capture a function for a list of sizes, replay. Used for the decode step (sizes are sequences), for the forward
pass of any batch (tokens) and for what follows it up to the sampled tokens (samples).
Owns: the captured graphs, their outputs, and counters. Does not know: what the function computes, requests, or which
size a batch runs in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from tqdm import tqdm

from weft.graph.capturing import NUM_WARMUPS, free_text, frozen_gc, reserved_bytes
from weft.graph.graph import Graph, GraphPool

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class GraphCounters:
    """Totals since the start.

    Attributes:
        captures: graphs captured.
        replays: steps that ran as a graph.
        missed: steps of the kind that fitted none of these graphs.
        rows, padding_rows: rows replayed, and how many of them were padding.
        capture_seconds: time that capturing took, warm-ups included.
        capture_bytes: device memory that the graphs hold.
    """

    captures: int = 0
    replays: int = 0
    missed: int = 0
    rows: int = 0
    padding_rows: int = 0
    capture_seconds: float = 0.0
    capture_bytes: int = 0


class SizedGraphs(Generic[T]):
    """Graphs of ``function`` for several sizes.

    Args:
        what: named on the progress bar and in messages, for example "decode graphs".
        function: from a size to static outputs, from static buffers.
        pool: where graphs come from.
        sizes: ascending.
        budget_bytes: device memory that the graphs may hold; sizes are captured largest first, and the rest is left out
            with a message when it is used up. None: no limit.
        keep_gc: leave the garbage collector on during capture.
        show_progress: a progress bar with the free memory.
    """

    def __init__(
        self,
        what: str,
        function: Callable[[int], T],
        pool: GraphPool,
        sizes: Sequence[int],
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        keep_gc: bool = False,
        show_progress: bool = True,
    ) -> None:
        self.counters = GraphCounters()
        self._graphs: dict[int, tuple[Graph, T]] = {}
        self._device = device
        started = time.perf_counter()
        with frozen_gc(enabled=not keep_gc):
            self._capture_all(what, function, pool, sorted(sizes, reverse=True), budget_bytes, show_progress)
        self.sizes = sorted(self._graphs)
        self.counters.captures = len(self.sizes)
        self.counters.capture_seconds = time.perf_counter() - started

    def _capture_all(
        self,
        what: str,
        function: Callable[[int], T],
        pool: GraphPool,
        sizes: list[int],
        budget: int | None,
        show_progress: bool,
    ) -> None:
        with tqdm(sizes, desc=f"Capturing {what}", disable=not show_progress, dynamic_ncols=True) as bar:
            for size in bar:
                used = self.counters.capture_bytes
                if budget is not None and used > budget:
                    left = [s for s in sizes if s <= size]
                    logger.warning("%s hold %d MiB, the budget is used up: none for sizes %s", what, used >> 20, left)
                    return
                for _ in range(NUM_WARMUPS):
                    function(size)
                before = reserved_bytes(self._device)
                self._graphs[size] = pool.capture(lambda size=size: function(size))  # type: ignore[misc]
                self.counters.capture_bytes += reserved_bytes(self._device) - before
                bar.set_postfix_str(free_text(self._device), refresh=False)

    def replay(self, size: int, num_rows: int) -> T:
        """Run the graph of ``size``, of which ``num_rows`` rows are real. Its outputs are valid until the next replay
        of any graph of the pool."""
        graph, outputs = self._graphs[size]
        graph.replay()
        self.counters.replays += 1
        self.counters.rows += size
        self.counters.padding_rows += size - num_rows
        return outputs
