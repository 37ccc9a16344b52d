"""Products whose rows have the same bits for any number of rows: values, and equal bits over tiles and kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.interpreter import DEVICE
from weft.ops.activation import silu_and_mul
from weft.ops.backend import Backend
from weft.ops.linear import invariant_linear_parts, linear, linear_reference
from weft.ops.linear.invariant import Order, Tile, few_rows, invariant_linear_triton, many_rows, order_of
from weft.ops.norm import rms_norm

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter's products of bfloat16 are wrong
SHAPES = (
    [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 1024), (9216, 2048), (2048, 4096), (12352, 2048), (520, 2048)]
    if ON_GPU
    else [(96, 192), (80, 512)]
)
COUNTS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1000, 1024, 1025, 2048, 4096) if ON_GPU else (
    1, 8, 9, 33,
)  # fmt: skip
TILES = [
    (few_rows, Tile(16, 16, 64, 4, 2)), (few_rows, Tile(32, 16, 64, 4, 1, held=True)),
    (few_rows, Tile(64, 32, 64, 4, 3)), (many_rows, Tile(32, 16, 64, 4, 2, group=2)),
    (many_rows, Tile(64, 64, 64, 4, 2)),
    *([(many_rows, Tile(128, 128, 64, 8, 4, group=8)), (few_rows, Tile(64, 128, 64, 4, 4))] if ON_GPU else []),
]  # fmt: skip


def operands(count: int, rows: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + inner)
    x = torch.randn(count, inner, device=DEVICE).to(DTYPE)
    weight = torch.randn(rows, inner, device=DEVICE).mul(inner**-0.5).to(DTYPE)
    return x, weight, torch.randn(rows, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tiles_have_equal_bits(with_bias: bool, gated: bool) -> None:
    x, weight, bias = operands(37, 96, 192)
    outs = []
    for product, tile in TILES:
        outs.append(torch.empty(37, 48 if gated else 96, dtype=DTYPE, device=DEVICE))
        product(x, weight, bias if with_bias else None, Order(2, 128), tile, gated=gated, out=outs[-1])
    want = linear_reference(x.double(), weight.double(), bias.double() if with_bias else None)
    want = silu_and_mul.reference(want) if gated else want
    assert float((outs[0].double() - want).norm() / want.norm()) < 5e-3
    for out, (_, tile) in zip(outs, TILES, strict=True):
        assert torch.equal(out, outs[0]), tile


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_do_not_depend_on_their_number(gated: bool, shape: tuple[int, int]) -> None:
    x, weight, _ = operands(max(COUNTS) + 7, *shape)
    whole = invariant_linear_triton(x, weight, None, gated=gated)
    want = linear_reference(x.double(), weight.double())
    want = silu_and_mul.reference(want) if gated else want
    assert float((whole.double() - want).norm() / want.norm()) < 5e-3
    for count in COUNTS:
        assert torch.equal(invariant_linear_triton(x[:count], weight, None, gated=gated), whole[:count]), count


def test_spans_follow_from_the_weight_alone() -> None:
    assert order_of(4096, 1024) == Order(1, 1024) and order_of(1024, 3072) == Order(4, 768)
    assert order_of(2048, 4096) == Order(4, 1024), "no span is longer than 1,024"
    assert order_of(520, 2048) == Order(8, 256), "nor shorter than 256"
    assert order_of(96, 200) == Order(1, 256), "the last step of a span may be incomplete"


def test_a_norm_adds_the_sums_of_spans_to_the_same_bits() -> None:
    """Few rows leave the sums of spans to the norm; many come whole. The norm's own sum has one order for both."""
    x, weight, _ = operands(33, 1024, 2048) if ON_GPU else operands(17, 80, 512)
    parts = invariant_linear_parts(x, weight, backend=Backend.INVARIANT_TRITON)
    whole = linear(x, weight, backend=Backend.INVARIANT_TRITON)
    assert parts.shape == (order_of(*weight.shape).splits, *whole.shape) and len(parts) > 1
    residual, scale = torch.randn_like(whole), torch.rand_like(whole[0])
    both = [
        torch.cat(rms_norm(y, scale, 1e-6, residual=residual, backend=Backend.INVARIANT_TRITON), 1)
        for y in (parts, whole)
    ]
    assert torch.equal(*both)
