"""Pieces by capture: a stream capture that is broken at split ops while the model runs eagerly.

Job: run a function, record what lies between its split ops as graphs, note the split ops, and replay both in order.
Owns: the static memory of every tensor that crosses a break. Does not know: models, layers, batches, sizes.

    capture │ piece 0 ─▶ qkv ┊ (attention noted, not run) ┊ out ─▶ piece 1 ─▶ qkv ┊ … ┊ out ─▶ piece n ─▶ result
    replay  │ graph          ┊ attention on real rows     ┊        graph          ┊ … ┊        graph

What goes into a split op is copied to static memory inside the piece before it; what comes out is written to static
memory that the next piece reads. One such buffer serves all layers and all sizes, because they run one after the other.
Everything else that lives across a break (the residual stream) stays in the pool: at capture its owner holds it until
its last use, so later pieces of the same pass cannot be given its memory, and another pass fills it again before it
reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.graph.graph import Graph, GraphPool, Recording
from weft.graph.split_ops import SplitOp


@dataclass(frozen=True, slots=True)
class SplitCall:
    """A split op between two pieces; replayed with the forward context of the moment."""

    op: SplitOp
    layer: Any
    inputs: tuple[Tensor, ...]
    out: Tensor

    def replay(self) -> None:
        self.op.fill(self.layer, self.inputs, self.out)


@dataclass(frozen=True, slots=True)
class PieceSequence:
    """One pass: graphs and split calls in order. It is a ``Graph``, but needs an active forward context."""

    steps: tuple[Graph | SplitCall, ...]

    def replay(self) -> None:
        for step in self.steps:
            step.replay()

    @property
    def num_pieces(self) -> int:
        return sum(not isinstance(step, SplitCall) for step in self.steps)


class CrossingBuffers:
    """Static memory of the tensors that cross a break: one buffer per role, shared by all layers and sizes.

    Args:
        max_rows: rows of the largest pass.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def take(self, role: tuple[object, ...], like: Tensor, width: int | None = None) -> Tensor:
        """A buffer with the rows and dtype of ``like``, and its other dimensions or ``width`` columns."""
        tail = like.shape[1:] if width is None else (width,)
        key = (*role, tuple(tail), like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros(self._max_rows, *tail)
        return self._buffers[key][: like.shape[0]]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def scribble(self) -> None:
        """Fill floating-point buffers with NaN, to show that a pass depends on nothing that the last one left."""
        for buffer in self._buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)


class PieceCapture:
    """Captures passes in pieces. It is the ``breaks`` of the forward context in which the function runs.

    Args:
        pool: where graphs come from.
        names: split ops that break a pass; the others are captured.
        max_rows: rows of the largest pass.
    """

    def __init__(self, pool: GraphPool, names: frozenset[str], max_rows: int) -> None:
        self.names = names
        self.buffers = CrossingBuffers(max_rows)
        self._pool = pool
        self._recording: Recording | None = None
        self._steps: list[Graph | SplitCall] = []
        self._outputs: list[tuple[int, weakref.ref[Tensor]]] = []
        self._plan: list[int] = []
        self._num_breaks = 0

    def warm_up(self, function: Callable[[], Tensor]) -> None:
        """Run the pieces, and no split op, without capturing. Decides which outputs can share memory."""
        self._num_breaks, self._outputs, self._plan = 0, [], []
        self._result(function())

    def capture(self, function: Callable[[], Tensor]) -> tuple[PieceSequence, Tensor]:
        """Capture one pass, after a warm-up.

        Returns:
            The pass, and the static memory in which it leaves ``function``'s result (shared by all passes).
        """
        self._num_breaks, self._steps = 0, []
        try:
            with self._pool.recording() as self._recording:
                self._recording.begin()
                result = self._result(function())
                self._steps.append(self._recording.end())
        finally:
            self._recording = None
        assert self._num_breaks == len(self._plan), "the pass breaks elsewhere than in its warm-up"
        steps, self._steps = tuple(self._steps), []
        return PieceSequence(steps), result

    def at(self, op: SplitOp, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """A break; see ``Breaks``."""
        static = tuple(self.buffers.take((op.name, "input", i), x).copy_(x) for i, x in enumerate(inputs))
        number, width = self._output_number(), op.width(layer)
        out = self.buffers.take(("output", number), inputs[0], width)
        if self._recording is not None:
            self._steps.append(self._recording.end())
            self._steps.append(SplitCall(op, layer, static, self.buffers.take(("output", number), inputs[0], width)))
            self._recording.begin()
        else:
            self._outputs.append((number, weakref.ref(out)))
        self._num_breaks += 1
        return out

    @property
    def num_breaks(self) -> int:
        """Breaks of one pass."""
        return len(self._plan)

    def _output_number(self) -> int:
        """The output buffer of the next break: the first that nobody reads any more.

        Who still holds an output is seen in the warm-up only (a recorder holds everything); the capture does the same.
        """
        if self._recording is None:
            held = {number for number, out in self._outputs if out() is not None}
            self._plan.append(next(n for n in range(len(held) + 1) if n not in held))
        assert self._num_breaks < len(self._plan), "the pass breaks elsewhere than in its warm-up"
        return self._plan[self._num_breaks]

    def _result(self, result: Tensor) -> Tensor:
        """The function's result in static memory: the pool's belongs to the next replay."""
        return self.buffers.take(("result",), result).copy_(result)
