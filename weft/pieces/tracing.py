"""A model's forward pass as one FX graph with a symbolic number of tokens, cut at split ops.

Job: run Dynamo over the pass once, with split ops and kernels as opaque operators. Bind the graph's inputs that never
change, and cut the graph into a module of submodules in the original order. Does not know: models, how pieces run.

Only memory that never moves may be bound: parameters, buffers, and static memory of the batch builder. Tensors whose
size depends on the batch belong to split ops, which look them up when they run. A cut graph::

    submod_0   embedding, norm, projection                       a piece
    submod_1   out = new_empty; attention_with_output(…, out)    a split op, with the memory of its output
    submod_2   projection, norm, MLP, norm, projection           a piece
    …
"""

import dataclasses
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from weft.errors import ConfigError
from weft.forward_context import Batch, ForwardContext, forward_context
from weft.graph.split_ops import SplitOp, known_split_ops, split_op_named
from weft.pieces.split_points import OUTPUT_SUFFIX, operator_of, output_like

STATIC_BATCH_FIELDS = ("token_count",)
"""Tensors of a batch that have one place and size in every step."""


@dataclass(frozen=True, slots=True)
class TracedPass:
    """One pass.

    Attributes:
        graph: inputs in the order of ``inputs``; returns a tuple of one tensor ``[num_tokens, hidden_size]``.
        inputs: what is bound to each input: a tensor; or ``NUM_TOKENS`` or ``TOKEN_IDS``, which a call brings.
    """

    graph: GraphModule
    inputs: tuple[Any, ...]


NUM_TOKENS, TOKEN_IDS = "num_tokens", "token_ids"


class Opaque:
    """The ``breaks`` of a trace: every split op becomes an operator that writes into memory of its caller.

    Args:
        operations: names of ``traced_op`` functions that stay operators; others are traced through their references.
    """

    def __init__(self, operations: frozenset[str]) -> None:
        self._operators = {name: operator_of(split_op_named(name)) for name in known_split_ops()}
        self.names = operations | self._operators.keys()

    def at(self, op: SplitOp, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        out = output_like(op, layer, inputs)
        self._operators[op.name](*inputs, out, layer.name)
        return out


def trace(
    model: Callable[..., Tensor],
    context: ForwardContext,
    device: torch.device,
    num_tokens: int,
    operations: frozenset[str] = frozenset(),
) -> TracedPass:
    """Trace ``model(ids)``. Nothing of it runs.

    Args:
        model: ``[T] int64 -> [T, hidden_size]``.
        context: of a captured batch, of any size.
        num_tokens: the size that a compiler shall have in mind; the graph holds for every size.
        operations: see ``Opaque``.

    Raises:
        ConfigError: Python code of the model that cannot be traced, or that decides by the number of tokens, or that
            reads tensors of the batch outside of a split op.
    """
    import torch._dynamo  # takes a second, and only traced pieces need it
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

    traced: list[tuple[GraphModule, Sequence[Any]]] = []

    def take(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        traced.append((graph, list(examples)))
        return lambda *_: (torch.empty(0),)

    ids = torch.zeros(max(2, num_tokens), dtype=torch.int64, device=device)
    torch._dynamo.mark_dynamic(ids, 0)
    compiled = torch.compile(_fresh_code(model), backend=take, fullgraph=True)
    # Otherwise a size that differs from the model traced before, for example its width, would become a variable.
    one_model = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    passed = dataclasses.replace(context, breaks=Opaque(operations), any_num_tokens=True)
    try:
        with one_model, forward_context(passed):
            compiled(ids)
    except (TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode) as error:
        raise ConfigError(
            f"the model's forward pass cannot be traced ({_first_line(error)}); "
            "use piecewise_cuda_graph_compiler='capture' without enable_torch_compile, which runs any model"
        ) from error
    ((graph, examples),) = traced
    _check_any_size(graph)
    _check_no_fetches(graph)
    _check_bound(examples, ids, context.batch)
    return TracedPass(graph, tuple(_binding(example, ids) for example in examples))


def _fresh_code(model: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """A function with a code object of its own: Dynamo files its results, and counts its attempts, by code object."""

    def forward(ids: Tensor) -> Tensor:
        return model(ids)

    code = forward.__code__.replace(co_name="traced_forward")
    return types.FunctionType(code, forward.__globals__, "traced_forward", None, forward.__closure__)


def _binding(example: Any, ids: Tensor) -> Any:
    if example is ids:
        return TOKEN_IDS
    return example if isinstance(example, Tensor) else NUM_TOKENS


def _check_any_size(graph: GraphModule) -> None:
    """A decision by the number of tokens leaves a condition behind under which alone the graph holds."""
    values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes = [value for value in values if isinstance(value, torch.SymInt)]
    conditions = [str(guard.expr) for size in sizes for guard in size.node.shape_env.guards]
    if conditions:
        raise ConfigError(
            f"the model's forward pass cannot be traced: it decides by the number of tokens ({'; '.join(conditions)}); "
            "make what decides a split op or an operation, or use piecewise_cuda_graph_compiler='capture'"
        )


def _check_no_fetches(graph: GraphModule) -> None:
    """A number that the device computes and the host fetches would stop a capture."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value):
            raise ConfigError(
                f"the model's forward pass cannot be traced: the host waits for {node.name} of the device; "
                "make what reads it a split op, or use piecewise_cuda_graph_compiler='capture'"
            )


def _check_bound(examples: Sequence[Any], ids: Tensor, batch: Batch) -> None:
    moving = {id(tensor): name for name, tensor in _tensors_of(batch) if name not in STATIC_BATCH_FIELDS}
    for example in examples:
        if id(example) in moving:
            raise ConfigError(
                f"the model reads batch.{moving[id(example)]} outside of a split op, so its pass cannot be traced; "
                "make the method that reads it a split op, or use piecewise_cuda_graph_compiler='capture'"
            )
    assert any(example is ids for example in examples), "the pass does not read its token ids"


def _tensors_of(table: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in the fields of a batch and of its tables, by name."""
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Tensor):
            yield prefix + field.name, value
        elif dataclasses.is_dataclass(value):
            yield from _tensors_of(value, f"{prefix}{field.name}.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


@dataclass(frozen=True, slots=True)
class SplitItem:
    """One part of a cut graph.

    Attributes:
        graph: the part's operations. A split op's output is the memory to which it writes its result.
        op: name of the split op; None for a piece.
        layer: name of the layer that runs it; None for a piece.
    """

    name: str
    graph: GraphModule
    op: str | None = None
    layer: str | None = None


def split_graph(traced: GraphModule, names: Iterable[str]) -> tuple[GraphModule, list[SplitItem]]:
    """Cut a graph before and after every split op in ``names``.

    Args:
        traced: calls split ops as ``weft::<name>_with_output(*inputs, out, layer_name)``. It is left as it is.
        names: the ops to cut at; calls of others stay inside pieces.

    Returns:
        The graph as a module of submodules, with the same inputs and outputs, and its parts in order. What picks one of
        several results (``getitem``) stands in the part that computes them; the memory of a split op's output is made
        in the split op's own part. Between two split ops with nothing in between there is no piece.
    """
    wanted = {f"weft.{name}{OUTPUT_SUFFIX}": name for name in names}
    part, kinds = _assign_parts(traced.graph, wanted)
    module = split_module(traced, traced, lambda node: part[node], keep_original_order=True)
    items = []
    for number, kind in kinds.items():
        name = f"submod_{number}"
        graph = module.get_submodule(name)
        assert isinstance(graph, GraphModule)
        op, layer = kind if kind is not None else (None, None)
        items.append(SplitItem(name, graph, op, layer))
    return module, items


def _assign_parts(graph: Graph, wanted: dict[str, str]) -> tuple[dict[Node, int], dict[int, tuple[str, str] | None]]:
    """The part of each node; and for each part, in order, op and layer if it is a split op."""
    outputs = {node.args[-2]: node for node in graph.nodes if _op_name(node) in wanted}
    part: dict[Node, int] = {}
    kinds: dict[int, tuple[str, str] | None] = {}
    number = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in part:
            continue
        if _op_name(node) in wanted:
            number += 1
            kinds[number] = wanted[_op_name(node)], str(node.args[-1])
            part[node] = number
            memory = node.args[-2]
            if isinstance(memory, Node) and _allocates(memory):
                part[memory] = number
            number += 1
        elif _allocates(node) and node in outputs:
            continue  # with its split op
        elif node.target is operator.getitem and node.args[0] in part:
            part[node] = part[node.args[0]]
        else:
            part[node] = number
            kinds[number] = None
    return part, dict(sorted(kinds.items()))


def _op_name(node: Node) -> str:
    """``namespace.name`` of the operator that a node calls; empty if it calls none."""
    return str(node.target).removesuffix(".default") if node.op == "call_function" else ""


def _allocates(node: Node) -> bool:
    return node.op == "call_method" and node.target == "new_empty"
