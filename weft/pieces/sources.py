"""Where pieces come from: the model as it is, or a traced pass whose pieces are run or compiled.

Job: make of a model a callable that computes the same and breaks at the same split ops, so that ``PieceCapture``
captures either alike. Does not know: models, sizes, how passes are captured.

    capture    the model itself: no tracing, ready at once
    eager      the pass traced by Dynamo and cut at split ops; the pieces run operation by operation
    inductor   the same, each distinct piece compiled once for any number of tokens, and kept on disk
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from weft.forward_context import ForwardContext, get_forward_context
from weft.graph.split_ops import known_split_ops, run_split_op, split_op_named
from weft.pieces.split_points import operator_of
from weft.pieces.tracing import NUM_TOKENS, TOKEN_IDS, SplitItem, split_graph, trace

Forward = Callable[..., Tensor]
"""``(input_ids=[T] int64) -> [T, hidden_size]``, under a forward context."""


@dataclass(slots=True)
class CompileCounters:
    """Totals since the start.

    Attributes:
        cache_hits: distinct pieces that were found on disk.
        reused: pieces that are the same code as one before them.
    """

    compiled: int = 0
    cache_hits: int = 0
    reused: int = 0


class Traced:
    """``eager`` and ``inductor``: the traced pass.

    Args:
        device: where the model is.
        compile_piece: from a piece to a callable of the same arguments, which returns a sequence of the results.
        operations: names of operations that stay opaque in the trace.
        counters: of what ``compile_piece`` does.
    """

    def __init__(
        self,
        device: torch.device,
        compile_piece: Callable[[GraphModule], Callable[..., Any]],
        operations: frozenset[str],
        counters: CompileCounters | None = None,
    ) -> None:
        self.counters = counters or CompileCounters()
        self._device, self._compile, self._operations = device, compile_piece, operations

    def prepare(self, model: Forward, context: ForwardContext, num_tokens: int) -> Forward:
        """The callable to capture in the model's place.

        Args:
            model: breaks at split ops as the forward context says; so does the result.
            context: of a captured batch.
            num_tokens: the size to optimise for; the result holds for every size.

        Raises:
            ConfigError: this model cannot be traced.
        """
        traced = trace(model, context, self._device, num_tokens, self._operations)
        # Cut also at split ops that will not break a capture: values that they look up must not be compiled in.
        module, items = split_graph(traced.graph, known_split_ops())
        for item in items:
            runner = SplitOpModule(item) if item.op is not None else self._piece(item.graph)
            module.set_submodule(item.name, runner)
        return SplitPass(module, items, traced.inputs)

    def _piece(self, graph: GraphModule) -> nn.Module:
        returns_one = isinstance(graph.graph.output_node().args[0], Node)
        return PieceModule(self._compile(graph), unpack=returns_one)


class SplitPass:
    """A traced and cut pass, with what is bound to its inputs.

    Attributes:
        items: the parts as they were traced, in order.
    """

    def __init__(self, module: GraphModule, items: list[SplitItem], inputs: tuple[Any, ...]) -> None:
        self.items = tuple(items)
        self._module, self._inputs = module, inputs

    def __call__(self, input_ids: Tensor) -> Tensor:
        given = {NUM_TOKENS: input_ids.shape[0], TOKEN_IDS: input_ids}
        arguments = [given[bound] if isinstance(bound, str) else bound for bound in self._inputs]
        (hidden_states,) = self._module(*arguments)
        return hidden_states


class PieceModule(nn.Module):
    """A piece in the place of its graph."""

    def __init__(self, function: Callable[..., Any], *, unpack: bool) -> None:
        super().__init__()
        self._function, self._unpack = function, unpack

    def forward(self, *arguments: Any) -> Any:
        results = self._function(*arguments)
        return results[0] if self._unpack else results


class SplitOpModule(nn.Module):
    """A split op in the place of its graph: the layer's method, or a break there."""

    def __init__(self, item: SplitItem) -> None:
        super().__init__()
        assert item.op is not None and item.layer is not None
        self._op, self._layer = split_op_named(item.op), item.layer
        placeholders = list(item.graph.graph.find_nodes(op="placeholder"))
        (call,) = item.graph.graph.find_nodes(op="call_function", target=operator_of(self._op))
        self._places = [placeholders.index(node) for node in call.args[:-2]]

    def forward(self, *arguments: Any) -> Tensor:
        layer = get_forward_context().layers[self._layer]
        return run_split_op(self._op, layer, tuple(arguments[place] for place in self._places))


def run_eagerly(graph: GraphModule) -> Callable[..., Any]:
    """The piece operation by operation."""
    returns_one = isinstance(graph.graph.output_node().args[0], Node)
    return (lambda *arguments: (graph(*arguments),)) if returns_one else graph
