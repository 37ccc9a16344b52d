"""Split ops: what the decorator makes, which names break a pass, and that the plain call stays plain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft.layers.attention
import weft.layers.gated_delta_net  # noqa: F401
from tests.pieces.fake_model import SIZE, RunningSum, context_of
from weft.errors import ConfigError
from weft.forward_context import forward_context, get_forward_context
from weft.graph.split_ops import known_split_ops, split_op, split_op_named
from weft.pieces.split_points import NAMED_CALL, operator_of, select_split_ops, split_op_of_inputs


def test_a_new_kind_of_layer_needs_one_decorator() -> None:
    class Doubler(nn.Module):
        name = "layers.7"

        @split_op("doubler", width=lambda layer: 3)
        def mix(self, x: Tensor, y: Tensor) -> Tensor:
            return 2 * x + y[: get_forward_context().batch.num_tokens]

    out = torch.full((4, 3), float("nan"))
    with forward_context(context_of([1, 2], {"layers.7": Doubler()})):
        operator_of(split_op_named("doubler"))(torch.ones(4, 3), torch.ones(4, 3), out, "layers.7")
    assert out.tolist() == [[3.0] * 3] * 3 + [[0.0] * 3]
    assert "doubler" in known_split_ops() and "doubler" in select_split_ops(["+doubler"])[0]


def test_mutation_is_declared_and_the_fake_runs_without_a_context() -> None:
    schema = operator_of(split_op_named("running_sum"))._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out"] and not schema.returns
    with FakeTensorMode():
        operator_of(split_op_named("running_sum"))(torch.empty(3, SIZE), torch.empty(3, SIZE), "nobody")


@pytest.mark.parametrize("padding", [0, 1, 63])
def test_the_operation_sees_real_rows_and_zeroes_the_others(padding: int) -> None:
    layer, x = RunningSum("a"), torch.randn(65 + padding, SIZE)
    x[65:] = float("nan")
    out = torch.full_like(x, float("nan"))
    with forward_context(context_of([1, 64], {"a": layer})):
        operator_of(split_op_named("running_sum"))(x, out, "a")
        assert torch.equal(out[:65], layer.mix(x[:65]))
    assert not out[65:].any()


class Notes:
    """Breaks that only take note."""

    def __init__(self, *names: str) -> None:
        self.names, self.seen = frozenset(names), []  # type: ignore[var-annotated]

    def at(self, op, layer, inputs):  # type: ignore[no-untyped-def]
        self.seen.append((op.name, layer.name, len(inputs)))
        return inputs[0]


def test_a_call_breaks_only_where_breaks_are_wanted() -> None:
    layer, x = RunningSum("a"), torch.ones(3, SIZE)
    with forward_context(context_of([3], {"a": layer})):
        layer.mix(x)
    for names, calls in ((("attention",), 2), (("running_sum",), 2)):
        notes = Notes(*names)
        with forward_context(context_of([3], {"a": layer}, breaks=notes)):
            layer.mix(x)
        assert layer.calls == calls
    assert notes.seen == [("running_sum", "a", 1)]


def test_names() -> None:
    assert select_split_ops() == ({"attention"}, ())
    assert select_split_ops(["weft::attention_with_output"]) == ({"attention"}, ())
    assert select_split_ops(["+gated_delta_net"]) == ({"attention", "gated_delta_net"}, ())
    assert select_split_ops(["gated_delta_net"]) == ({"gated_delta_net"}, ())
    assert select_split_ops(["+MLP", "a.b", "attention"]) == ({"attention"}, ("MLP", "a.b"))
    assert select_split_ops(None, also=["all_reduce"]) == ({"attention", "all_reduce"}, ())
    with pytest.raises(ConfigError, match=r"'attentoin', which is no split op; there are .*attention"):
        select_split_ops(["attentoin"])


def test_calls_that_an_earlier_model_split_off_by_name_are_no_names() -> None:
    name = f"{NAMED_CALL}Mlp_1"
    assert split_op_of_inputs(name, 1).name in known_split_ops()
    with pytest.raises(ConfigError, match=rf"names '{name}', which is no split op; there are (?!.*{name})"):
        select_split_ops([name])
