"""A forward pass in captured pieces: a stream capture that is broken at split ops while the model runs eagerly.

Job: run the model, record what lies between its split ops as graphs, note the split ops, and replay both in order, for
a list of token counts. Owns: the static memory of token ids and of every tensor that crosses a break. Does not know:
what the model computes, which batch runs in pieces.

    capture │ piece 0 ─▶ qkv ┊ (attention noted, not run) ┊ out ─▶ piece 1 ─▶ qkv ┊ … ┊ out ─▶ piece n ─▶ result
    replay  │ graph          ┊ attention on real rows     ┊        graph          ┊ … ┊        graph

A split op's inputs are copied to static memory inside the piece before it. Its output is written to static memory that
the next piece reads. One buffer serves all layers and all sizes, because no two run at once. Every other tensor that
lives across a break (the residual stream) stays in the pool. During capture the model holds a reference to the tensor
until the last use, so later pieces of the pass cannot reuse the memory. Another pass writes the memory before reading.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.forward_context import ForwardContext, forward_context
from weft.graph.graph import Graph, GraphPool, Recording
from weft.graph.graph_set import CaptureOptions, GraphCounters, GraphSet
from weft.graph.split_ops import SplitOp
from weft.pieces.sources import Forward
from weft.pieces.split_points import NAMED_CALL, write_real_rows


@dataclass(frozen=True, slots=True)
class SplitCall:
    """A split op between two pieces; replayed with the forward context of the moment."""

    op: SplitOp
    layer: Any
    inputs: tuple[Tensor, ...]
    out: Tensor

    def replay(self) -> None:
        write_real_rows(self.op, self.layer, self.inputs, self.out)


@dataclass(frozen=True, slots=True)
class PieceSequence:
    """One pass: graphs and split calls in order. It is a ``Graph``, but needs an active forward context."""

    steps: tuple[Graph | SplitCall, ...]

    def replay(self) -> None:
        for step in self.steps:
            step.replay()


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

    def named(self) -> dict[str, Tensor]:
        """The buffers by a name that tells their role."""
        return {" ".join(str(part) for part in ("crossing buffer", *key)): t for key, t in self._buffers.items()}


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


class PiecewiseModel:
    """A model captured in pieces.

    Args:
        model: breaks at split ops.
        context: from a token count to the forward context of a capture; what the pieces read of its batch must be
            static device memory.
        pool: where graphs come from.
        sizes: token counts to capture.
        split_ops: names of the ops that break the pass.
        budget_bytes: see ``GraphSet``.

    Attributes:
        sizes: captured token counts, ascending.
    """

    def __init__(
        self,
        model: Forward,
        context: Callable[[int], ForwardContext],
        pool: GraphPool,
        sizes: Sequence[int],
        split_ops: frozenset[str],
        options: CaptureOptions,
        budget_bytes: int | None = None,
    ) -> None:
        self.model, self._context = model, context
        self._ids = torch.zeros(max(sizes), dtype=torch.int64, device=options.device)
        self._source = PieceCapture(pool, split_ops, max(sizes))
        if watched := options.watched:
            crossing = self._source.buffers.named
            options = dataclasses.replace(options, watched=lambda: {**watched(), **crossing(), "token ids": self._ids})
        self._graphs: GraphSet[Tensor] = GraphSet("pieces", self, sizes, options, budget_bytes, warm_every_size=True)
        self.sizes = self._graphs.sizes

    def warm_up(self, size: int) -> None:
        self._source.warm_up(lambda: self._pass(size))

    def record(self, size: int) -> tuple[Graph, Tensor]:
        return self._source.capture(lambda: self._pass(size))

    def _pass(self, size: int) -> Tensor:
        """The model on the static ids. Its batch is made here, so that what is gathered for it (the page table, for
        attention inside a piece) is gathered anew by every replay."""
        named = any(name.startswith(NAMED_CALL) for name in self._source.names)
        context = dataclasses.replace(self._context(size), breaks=self._source, any_num_tokens=named)
        with forward_context(context):
            return self.model(input_ids=self._ids[:size])

    @property
    def counters(self) -> GraphCounters:
        return self._graphs.counters

    def results(self, size: int) -> Tensor:
        """Where a replay of a captured size leaves the hidden states."""
        return self._graphs.results(size)

    def sequence(self, size: int) -> PieceSequence:
        """The pass captured for ``size`` tokens, to look at."""
        graph = self._graphs.graph(size)
        assert isinstance(graph, PieceSequence)
        return graph

    def run(self, context: ForwardContext, input_ids: Tensor, size: int) -> Tensor:
        """Run a batch of at most ``size`` tokens in the pieces captured for ``size``.

        Args:
            context: of the batch, with its real sizes; split ops run under it.
            input_ids: ``[T] int64``.

        Returns:
            ``[T, hidden_size]``, valid until the next replay.
        """
        assert size in self.sizes, f"no pieces are captured for {size} tokens, only for {self.sizes}"
        count = input_ids.shape[0]
        self._ids[:count].copy_(input_ids)
        with forward_context(context):
            return self._graphs.replay(size, count)[:count]
