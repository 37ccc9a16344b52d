"""Full graphs of the decode step: one per batch size, from the packed inputs to the sampled token.

Job: capture the step for a list of sizes, replay, hand out the real rows.
Owns: the captured graphs, their outputs, and counters. Does not know: what the step computes, requests,
or which size a batch runs in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from weft.graph.capturing import NUM_WARMUPS, free_text, frozen_gc, used_bytes
from weft.graph.graph import Graph, GraphPool
from weft.layers.sampler import SamplerOutput

logger = logging.getLogger(__name__)

DecodeOutputs = tuple[Tensor, SamplerOutput]
"""What a decode step leaves on the device: ``logits [N, V]`` and the sampled tokens."""


@dataclass(slots=True)
class GraphCounters:
    """Totals since the start.

    Attributes:
        captures: graphs captured.
        replays: steps that ran as a graph.
        eager_decodes: decode steps that fitted none of these graphs.
        rows, padding_rows: rows replayed, and how many of them were padding.
        capture_seconds: time that capturing took, warm-ups included.
        capture_bytes: device memory that the graphs hold.
    """

    captures: int = 0
    replays: int = 0
    eager_decodes: int = 0
    rows: int = 0
    padding_rows: int = 0
    capture_seconds: float = 0.0
    capture_bytes: int = 0


class DecodeGraphs:
    """Graphs of ``step`` for several batch sizes.

    Args:
        step: runs a decode step padded to the given size, from static buffers, and returns static outputs.
        pool: where graphs come from.
        sizes: ascending batch sizes.
        budget_bytes: device memory that the graphs may hold; sizes are captured largest first, and the rest is left out
            with a message when it is used up. None: no limit.
        keep_gc: leave the garbage collector on during capture.
        show_progress: a progress bar with the free memory.
    """

    def __init__(
        self,
        step: Callable[[int], DecodeOutputs],
        pool: GraphPool,
        sizes: Sequence[int],
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        keep_gc: bool = False,
        show_progress: bool = True,
    ) -> None:
        self.counters = GraphCounters()
        self._graphs: dict[int, tuple[Graph, DecodeOutputs]] = {}
        self._device = device
        started, before = time.perf_counter(), used_bytes(self._device)
        with frozen_gc(enabled=not keep_gc):
            self._capture_all(step, pool, sorted(sizes, reverse=True), before, budget_bytes, show_progress)
        self.sizes = sorted(self._graphs)
        self.counters.captures = len(self.sizes)
        self.counters.capture_bytes = used_bytes(self._device) - before
        self.counters.capture_seconds = time.perf_counter() - started

    def _capture_all(
        self,
        step: Callable[[int], DecodeOutputs],
        pool: GraphPool,
        sizes: list[int],
        before: int,
        budget: int | None,
        show_progress: bool,
    ) -> None:
        with tqdm(sizes, desc="Capturing decode graphs", disable=not show_progress, dynamic_ncols=True) as bar:
            for size in bar:
                used = used_bytes(self._device) - before
                if budget is not None and used > budget:
                    left = [s for s in sizes if s <= size]
                    logger.warning(
                        "graphs hold %d MiB, the budget is used up: no graphs for batch sizes %s", used >> 20, left
                    )
                    return
                for _ in range(NUM_WARMUPS):
                    step(size)
                self._graphs[size] = pool.capture(lambda size=size: step(size))  # type: ignore[misc]
                bar.set_postfix_str(free_text(self._device), refresh=False)

    def replay(self, size: int, num_seqs: int) -> DecodeOutputs:
        """Run the graph of ``size``. Returns the ``num_seqs`` real rows, valid until the next replay."""
        graph, outputs = self._graphs[size]
        graph.replay()
        self.counters.replays += 1
        self.counters.rows += size
        self.counters.padding_rows += size - num_seqs
        logits, result = outputs
        return logits[:num_seqs], SamplerOutput(result.token_ids[:num_seqs], None, result.nan_rows[:num_seqs])
