"""Operations that are one operator for a tracer: registered schemas, traces, and shapes and dtypes of fakes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import weft.ops.activation
import weft.ops.linear
import weft.ops.moe
import weft.ops.norm  # noqa: F401
from tests.pieces.fake_model import context_of
from weft.forward_context import forward_context
from weft.ops.backend import Backend
from weft.ops.traced import opaque_ops, traced_op
from weft.pieces.tracing import trace

CPU = torch.device("cpu")


class Way(StrEnum):
    UP = "up"
    DOWN = "down"


def shifted_reference(x: Tensor, by: float, *, other: Tensor | None = None, twice: bool = False) -> Any:
    """Torch reference of ``shifted``."""
    y = x + by + (0 if other is None else other)
    return (y, 2 * y) if twice else y


calls: list[Way] = []


@traced_op(shifted_reference, fusible=True)
def shifted(x: Tensor, by: float, *, other: Tensor | None = None, twice: bool = False, way: Way) -> Any:
    calls.append(way)
    return shifted_reference(x, by if way is Way.UP else -by, other=other, twice=twice)


def model(ids: Tensor) -> Tensor:
    y, doubled = shifted(ids[:, None].float(), 1.5, twice=True, way=Way.DOWN)
    return shifted(y + doubled, 2.0, other=y, way=Way.UP)


def traced(operations: frozenset[str]) -> tuple[list[str], Tensor]:
    pass_ = trace(model, context_of([1], {}), CPU, 8, operations)
    names = [str(node.target) for node in pass_.graph.graph.nodes if "weft" in str(node.target)]
    ids = torch.arange(3)
    given = {"num_tokens": 3, "token_ids": ids}
    with forward_context(context_of([3], {})):
        return names, pass_.graph(*(given[i] if isinstance(i, str) else i for i in pass_.inputs))[0]


def test_the_schema_follows_the_annotations() -> None:
    schema = str(torch.ops.weft.shifted.default._schema)
    assert schema == ("weft::shifted(Tensor x, float by, *, Tensor? other=None, bool twice=False, str way) -> Tensor[]")
    assert "Tensor num_tokens" in str(torch.ops.weft.topk_router.default._schema), "a number would be frozen"


def test_a_plain_call_is_the_function() -> None:
    calls.clear()
    assert torch.equal(shifted(torch.ones(2), 1.0, way=Way.DOWN), torch.zeros(2)) and calls == [Way.DOWN]


def test_a_trace_finds_the_operator_where_it_is_named_and_the_reference_elsewhere() -> None:
    """The two differ here, which they must not otherwise: DOWN is not the reference's way."""
    calls.clear()
    names, result = traced(frozenset({"shifted"}))
    assert names == ["weft.shifted.default"] * 2 and calls == [Way.DOWN, Way.UP]
    assert torch.equal(result, model(torch.arange(3)))
    names, result = traced(frozenset())
    assert names == [] and len(calls) == 4
    y = torch.arange(3)[:, None] + 1.5
    assert torch.equal(result, 3 * y + 2 + y)


def test_fusible_operations_are_those_bound_by_memory() -> None:
    every, kept = opaque_ops(fusible=True), opaque_ops(fusible=False)
    assert {"rms_norm", "silu_and_mul", "shifted"} <= every - kept
    assert {"fused_moe", "topk_router", "skinny_linear", "skinny_linear_silu_mul"} <= kept


def moe_arguments() -> tuple[list[Tensor], dict[str, Any]]:
    x, gate_up, down = torch.randn(7, 48), torch.randn(5, 48, 48), torch.randn(5, 48, 24)
    weights, ids = torch.rand(7, 2), torch.randint(5, (7, 2), dtype=torch.int32)
    wide = torch.randn(7, 8)
    return [x, gate_up, down, weights, ids], {"shared": torch.randn(7, 48), "shared_gate": wide[:, 5:6]}


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "norm": ("rms_norm", [torch.randn(7, 48), torch.randn(48), 1e-6], {"zero_centered": True}),
    "norm of a sum": ("rms_norm", [torch.randn(7, 48), torch.randn(48), 1e-6], {"residual": torch.randn(7, 48)}),
    "strided rows": ("rms_norm", [torch.randn(7, 60)[:, :48], torch.randn(48), 1e-6], {}),
    "mean square": ("mean_square", [torch.randn(7, 60)[:, :48], 2], {}),
    "gate of a norm": (
        "scale_by_mean_square",
        [torch.randn(7, 60)[:, :48], torch.rand(7, 1), torch.randn(48), 1e-6],
        {"gate": torch.randn(7, 60)[:, :48]},
    ),
    "silu": ("silu_and_mul", [torch.randn(7, 48)], {}),
    "router": (
        "topk_router",
        [torch.randn(7, 8)[:, :5], 2],
        {"renormalize": True, "num_tokens": torch.tensor([5], dtype=torch.int32)},
    ),
    "experts": ("fused_moe", *moe_arguments()),
}


@pytest.mark.parametrize("case", CASES)
def test_fakes_tell_shapes_dtypes_and_strides(case: str) -> None:
    """A compiler lays out what follows by them."""
    name, args, kwargs = CASES[case]
    operator = getattr(torch.ops.weft, name).default
    real = operator(*args, **kwargs, backend=Backend.TORCH.value)
    mode = FakeTensorMode()
    fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    fake_kwargs = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    with mode:
        fakes = operator(*fake_args, **fake_kwargs, backend=Backend.TORCH.value)
    assert [(f.shape, f.dtype, f.stride()) for f in fakes] == [(r.shape, r.dtype, r.stride()) for r in real]
