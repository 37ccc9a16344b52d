"""Cutting a traced pass: what stands where, in which order, and that the parts together are the whole."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from tests.pieces.fake_model import SIZE, Model, RunningSum, context_of
from weft.forward_context import forward_context
from weft.graph.split_ops import split_op_named
from weft.pieces.split_points import operator_of
from weft.pieces.tracing import NUM_TOKENS, TOKEN_IDS, SplitItem, TracedPass, split_graph, trace

CPU = torch.device("cpu")
OP = operator_of(split_op_named("running_sum"))


def traced(model: nn.Module, num_tokens: int = 8) -> TracedPass:
    return trace(model, context_of([2, 3], {}), CPU, num_tokens)


def kinds(items: list[SplitItem]) -> list[str | None]:
    return [item.layer for item in items]


def run(
    module: GraphModule, traced: TracedPass, ids: Tensor, mixers: dict[str, RunningSum], lengths: list[int]
) -> Tensor:
    given = {NUM_TOKENS: ids.shape[0], TOKEN_IDS: ids}
    with forward_context(context_of(lengths, mixers)):
        return module(*(given[i] if isinstance(i, str) else i for i in traced.inputs))[0]


@pytest.fixture
def model() -> Model:
    return Model().requires_grad_(False)


def test_pieces_and_split_ops_alternate_in_the_original_order(model: Model) -> None:
    pass_ = traced(model)
    before = [str(node) for node in pass_.graph.graph.nodes]
    module, items = split_graph(pass_.graph, ["running_sum"])
    assert kinds(items) == [None, "layers.0", None, "layers.1", None, "layers.2", None]
    assert {item.op for item in items} == {None, "running_sum"}
    order = [node.target for node in module.graph.nodes if node.op == "call_module"]
    assert order == [item.name for item in items]
    assert [str(node) for node in pass_.graph.graph.nodes] == before, "the traced graph was changed"


@pytest.mark.parametrize("count", [1, 2, 63, 130])
def test_the_parts_compute_what_the_model_does(model: Model, count: int) -> None:
    pass_ = traced(model)
    module, _ = split_graph(pass_.graph, ["running_sum"])
    ids = torch.randint(50, (count,))
    lengths = [count - 1, 1] if count > 1 else [1]
    with forward_context(context_of(lengths, model.table())):
        expected = model(ids)
    assert torch.equal(run(module, pass_, ids, model.table(), lengths), expected)


def test_the_memory_of_an_output_is_made_with_its_split_op(model: Model) -> None:
    _, items = split_graph(traced(model).graph, ["running_sum"])
    for item in items:
        made = [n for n in item.graph.graph.nodes if n.op == "call_method" and n.target == "new_empty"]
        called = item.graph.graph.find_nodes(op="call_function", target=OP)
        assert len(made) == len(called) == (item.op is not None)
        if item.op is not None:
            (output,) = item.graph.graph.find_nodes(op="output")
            assert output.args[0] is made[0], "the next piece reads what the op wrote"


def test_ops_that_are_not_named_stay_inside(model: Model) -> None:
    pass_ = traced(model)
    module, items = split_graph(pass_.graph, [])
    assert kinds(items) == [None]
    assert len(items[0].graph.graph.find_nodes(op="call_function", target=OP)) == 3
    ids = torch.arange(5)
    whole = run(pass_.graph, pass_, ids, model.table(), [2, 3])
    assert torch.equal(run(module, pass_, ids, model.table(), [2, 3]), whole)


class Adjacent(Model):
    """Two split ops with nothing between them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mixers[1].mix(self.mixers[0].mix(self.embed(input_ids)))


def test_nothing_between_two_split_ops_is_no_piece() -> None:
    _, items = split_graph(traced(Adjacent().requires_grad_(False)).graph, ["running_sum"])
    assert kinds(items) == [None, "layers.0", "layers.1"]


def hand_made() -> GraphModule:
    """``split`` of x before a split op; one of its results is picked only behind it, where nothing else is."""
    graph = Graph()
    x = graph.placeholder("x")
    halves = graph.call_function(torch.chunk, (x, 2, 1))
    left = graph.call_function(operator.getitem, (halves, 0))
    out = graph.call_method("new_empty", (left, 5, SIZE))
    graph.call_function(OP, (left, out, "layers.0"))
    right = graph.call_function(operator.getitem, (halves, 1))
    graph.output((graph.call_function(torch.add, (out, right)),))
    return GraphModule(nn.Module(), graph)


def test_getitem_stays_with_its_producer() -> None:
    whole = hand_made()
    module, items = split_graph(whole, ["running_sum"])
    assert kinds(items) == [None, "layers.0", None]
    picked = [len(item.graph.graph.find_nodes(op="call_function", target=operator.getitem)) for item in items]
    assert picked == [2, 0, 0], "a list of tensors would cross the cut"
    x, layers = torch.randn(5, 2 * SIZE), {"layers.0": RunningSum("layers.0")}
    with forward_context(context_of([2, 3], layers)):
        assert torch.equal(module(x)[0], whole(x)[0])


def test_parts_that_do_not_need_each_other_keep_their_order() -> None:
    """Two mixers of the same input: which of them comes first is seen nowhere but in the order of the graph."""
    graph = Graph()
    x = graph.placeholder("x")
    results = []
    for layer in ("layers.0", "layers.1"):
        out = graph.call_method("new_empty", (x, 5, SIZE))
        graph.call_function(OP, (x, out, layer))
        results.append(graph.call_function(torch.add, (out, 1.0)))
    graph.output((graph.call_function(torch.sub, tuple(reversed(results))),))
    module, items = split_graph(GraphModule(nn.Module(), graph), ["running_sum"])
    assert [item.layer for item in items] == ["layers.0", None, "layers.1", None]
    assert [node.target for node in module.graph.nodes if node.op == "call_module"] == [item.name for item in items]
