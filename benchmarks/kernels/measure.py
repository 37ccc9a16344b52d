"""Timing and checking shared by the kernel benchmarks: import it before any kernel.

Job: medians of graph replays, and relative errors; without a GPU, Triton's interpreter instead of the compiler.
Owns: the measured ceilings. Does not know: any kernel.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.bench import report

COPY_BYTES_PER_S = 4.25e12
"""Device copy on an H200, bytes read plus bytes written."""
MATRIX_FLOP_PER_S = 785e12
"""bf16 matrix product on an H200."""

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    from tests.ops import interpreter  # noqa: F401
L2_BYTES = 64 << 20


LEAST_CALLS = 24
"""In a graph: its own launch, some 7 us, would otherwise count as the kernels' (with two calls, 3.5 us each)."""


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int = 15, least: int = LEAST_CALLS) -> float:
    """Milliseconds per call: all calls in turn, ``least`` or more, in one CUDA graph, median over its replays.
    0.0 without a GPU (called once)."""
    for call in calls:
        call()
    if not ON_GPU:
        return 0.0
    calls = [*calls] * -(-least // len(calls))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) / len(calls)


def time_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds per call; see ``graph_ms``."""
    return graph_ms(calls) * 1e3


def error(actual: Tensor, want: Tensor) -> float:
    """``|actual - want| / |want|`` in float64; NaN never passes a comparison."""
    return ((actual.double() - want.double()).norm() / want.double().norm()).item()


def write_json(name: str, rows: list[dict[str, Any]]) -> None:
    """Write ``name`` into the folder named by OUT, with device, versions, command and date."""
    folder = os.environ.get("OUT")
    if folder is None:
        return
    (Path(folder) / name).write_text(json.dumps(report.provenance(DEVICE) | {"rows": rows}, indent=1))
