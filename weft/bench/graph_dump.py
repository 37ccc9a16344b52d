"""Profiling a prefill pass in pieces: each piece, each split op, and their cost.

Job: capture one pass with a pool that records its operations, run the pass, and join names, operations and times. Does
not know: how they are shown.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from weft.bench.step_timing import StepMaker
from weft.config import EngineConfig
from weft.forward_context import cache_tensors
from weft.graph.capture_sizes import token_sizes
from weft.graph.graph import GraphPool, make_pool
from weft.ops.backend import Backend
from weft.pieces.capture import PieceSequence, SplitCall
from weft.pieces.op_recorder import GraphWithOps, Note, Operation, OpRecordingPool, Place, Value, place_of
from weft.pieces.sources import SplitPass
from weft.runner.model_runner import ModelRunner

NUM_WARMUPS, NUM_REPEATS = 1, 5
LARGEST_DEFAULT = 512
"""Most tokens of the pass that is shown where the user names no size, if a captured size is that small."""


_STORED = ("weights[", "caches[")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece, or the split op between two.

    Attributes:
        name: ``piece_3``, or the op's.
        layer: that the op belongs to; empty for a piece.
        captured: it is a graph, replayed with one call.
        operations: of a piece.
        num_bytes: of the tensors that the operations of a piece are given and make, caches apart.
        ms: median milliseconds of its replay; of an op from the end of the piece before it to the begin of the next.
    """

    name: str
    layer: str
    captured: bool
    operations: tuple[Operation, ...]
    num_bytes: int
    ms: float

    @property
    def kernels(self) -> list[Operation]:
        return [operation for operation in self.operations if operation.is_kernel]

    @property
    def signature(self) -> tuple[object, ...]:
        """The same for parts that do the same work for other layers."""
        if not self.captured:
            return (self.name,)
        return tuple(operation.signature for operation in self.kernels)

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Kernels by name without overload and grid, the most frequent first."""
        names = (operation.name.split("[")[0] for operation in self.kernels)
        return Counter(".".join(name.split(".")[:2]) for name in names).most_common()


@dataclass(frozen=True, slots=True)
class GraphDump:
    """One pass.

    Attributes:
        num_tokens: rows of the pass.
        parts: pieces and split ops in turn.
        names: of parameters, caches and static buffers, by place.
        traced: the traced parts as Python, where pieces come from a trace.
    """

    num_tokens: int
    parts: tuple[Part, ...]
    names: Mapping[Place, str]
    traced: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[Part]:
        return [part for part in self.parts if part.captured]

    @property
    def ms(self) -> float:
        return sum(part.ms for part in self.parts)

    def code(self, piece: Part) -> str:
        """A piece as a Python function: what it takes from before, and one line per operation."""
        made: set[str] = set()
        taken: dict[str, Value] = {}
        lines = []
        for operation in piece.operations:
            for value in operation.inputs:
                name = value.name(self.names)
                if name not in made and not name.startswith(_STORED):
                    taken.setdefault(name, value)
            made |= {value.name(self.names) for value in operation.results}
            lines.append(f"    {operation.code(self.names)}")
        inputs = [f"    # {name}: {value.type_text}" for name, value in taken.items()]
        return "\n".join([f"def {piece.name}({', '.join(taken)}):", *inputs, *(lines or ["    pass"])]) + "\n"


def size_to_show(config: EngineConfig, num_tokens: int | None) -> int:
    """The number of tokens given, or the largest captured size up to ``LARGEST_DEFAULT``."""
    if num_tokens is not None:
        return num_tokens
    given, largest = config.piecewise_cuda_graph_tokens, config.piecewise_cuda_graph_max_tokens
    sizes = token_sizes(config.max_num_batched_tokens, given, largest)
    return max((size for size in sizes if size <= LARGEST_DEFAULT), default=sizes[0])


def dump_graphs(config: EngineConfig, num_tokens: int) -> GraphDump:
    """Capture a pass of ``num_tokens`` tokens in pieces, and run prompts of that many tokens in it.

    Args:
        config: of mode PIECEWISE; its sizes do not matter.
    """
    config = dataclasses.replace(
        config, piecewise_cuda_graph_tokens=(num_tokens,), piecewise_cuda_graph_max_tokens=None, cuda_graph_bs=(1,)
    )
    pools: list[OpRecordingPool] = []

    def recording_pool(device: torch.device) -> GraphPool:
        watch = launches_noted if config.backend == Backend.TRITON else None
        pools.append(OpRecordingPool(make_pool(device), device, watch))
        return pools[-1]

    runner = ModelRunner(config, recording_pool)
    pieces = runner.graphs.pieces
    assert pieces is not None, "the mode captures no pieces"
    sequence = pieces.sequence(num_tokens)
    times = _time(runner, pools[0], sequence, num_tokens)
    model = pieces.model
    traced = tuple(item.graph.code for item in model.items) if isinstance(model, SplitPass) else ()
    return GraphDump(num_tokens, tuple(_parts(runner, sequence, times)), _names(runner, sequence), traced)


@contextmanager
def launches_noted(note: Note) -> Iterator[None]:
    """Triton launches in the body are noted, and done."""
    from weft.ops.triton.launch import Kernel, launches_handled

    def noting(kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        note(f"{kernel.fn.__name__}[{list(grid)}]", args, options)
        kernel.run(*args, grid=grid, warmup=False, **options)

    with launches_handled(noting):
        yield


def _time(runner: ModelRunner, pool: OpRecordingPool, sequence: PieceSequence, num_tokens: int) -> list[float]:
    """Median milliseconds of each part."""
    step = StepMaker(runner, context=1).prefill(num_tokens)
    pieces = [step for step in sequence.steps if isinstance(step, GraphWithOps)]
    rounds = []
    for number in range(NUM_WARMUPS + NUM_REPEATS):
        pool.stopwatch.laps.clear()
        pool.stopwatch.on = number >= NUM_WARMUPS
        runner.run(step)
        laps = [lap for lap in pool.stopwatch.laps if lap[0] in pieces]
        if laps:
            moments = [moment for _, begin, end in laps for moment in (begin, end)]  # pieces and what is between them
            rounds.append([pool.stopwatch.ms(*pair) for pair in pairwise(moments)])
    pool.stopwatch.on = False
    return [median(column) for column in zip(*rounds, strict=True)]


def _parts(runner: ModelRunner, sequence: PieceSequence, times: Sequence[float]) -> list[Part]:
    caches = {tensor.untyped_storage().data_ptr() for tensor in cache_tensors(runner.caches).values()}
    parts: list[Part] = []
    for step, ms in zip(sequence.steps, times, strict=True):
        if isinstance(step, SplitCall):
            parts.append(Part(step.op.name, step.layer.name, False, (), 0, ms))
        else:
            assert isinstance(step, GraphWithOps)
            number = sum(part.captured for part in parts)
            num_bytes = sum(operation.num_bytes(caches) for operation in step.operations)
            parts.append(Part(f"piece_{number}", "", True, step.operations, num_bytes, ms))
    return parts


def _names(runner: ModelRunner, sequence: PieceSequence) -> dict[Place, str]:
    names: dict[Place, str] = {}
    for step in sequence.steps:
        if isinstance(step, SplitCall):
            for i, tensor in enumerate(step.inputs):
                names.setdefault(place_of(tensor), f"{step.op.name}_input_{i}")
            names.setdefault(place_of(step.out), f"{step.op.name}_output")
    names |= {place_of(tensor): f'caches["{name}"]' for name, tensor in cache_tensors(runner.caches).items()}
    stored = [*runner.model.named_parameters(), *runner.model.named_buffers()]
    return names | {place_of(tensor): f'weights["{name}"]' for name, tensor in stored}
