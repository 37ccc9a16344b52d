"""Products of heads with matrices of their own: values, and bits that do not depend on the number of rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.linear import head_linear

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter's products of bfloat16 are wrong
SHAPES = [(32, 128, 512), (32, 512, 128), (10, 256, 256)] if ON_GPU else [(3, 40, 24), (2, 16, 80)]
COUNTS = (1, 2, 15, 16, 17, 64, 65, 300, 1000) if ON_GPU else (1, 16, 17, 40)


@pytest.mark.parametrize("layout", ["dense", "transposed", "shared"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_for_any_number_of_rows(shape: tuple[int, ...], layout: str) -> None:
    heads, inner, width = shape
    torch.manual_seed(0)
    x = torch.randn(max(COUNTS) + 3, heads, 2 * inner, device=DEVICE).to(DTYPE)[..., :inner]  # rows may be strided
    weight = torch.randn(heads, width, inner, device=DEVICE).to(DTYPE).transpose(1, 2)
    weight = weight if layout == "transposed" else weight.contiguous()
    if layout == "shared":  # one matrix of all heads
        weight = weight[0].expand(heads, -1, -1)
    whole = head_linear(x, weight, backend=Backend.INVARIANT_TRITON)
    want = head_linear.reference(x.double(), weight.double())
    assert float((whole.double() - want).norm() / want.norm()) < (5e-3 if ON_GPU else 1e-5)
    for count in COUNTS:
        assert torch.equal(head_linear(x[:count], weight, backend=Backend.INVARIANT_TRITON), whole[:count]), count
