"""A traced pass, cut at split ops.

From one FX graph to a module of submodules in the original order, of which every second or so is a split op::

    submod_0   embedding, norm, projection                       a piece
    submod_1   out = new_empty; attention_with_output(…, out)    a split op, with the memory of its output
    submod_2   projection, norm, MLP, norm, projection           a piece
    …
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from weft.graph.split_ops import OUTPUT_SUFFIX


@dataclass(frozen=True, slots=True)
class SplitItem:
    """One part of a cut graph.

    Attributes:
        name: of the submodule.
        graph: what it computes; the memory in which a split op leaves its result is its output.
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
