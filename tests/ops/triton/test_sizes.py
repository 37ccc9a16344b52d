"""Host arithmetic of launches: the same numbers as Triton's own functions."""

from __future__ import annotations

import pytest

from weft.ops.triton.sizes import cdiv, next_power_of_2

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 130, 210, 2**20 - 1, 2**20, 2**31 + 1])
def test_as_triton(size: int) -> None:
    assert next_power_of_2(size) == triton.next_power_of_2(size)
    assert [cdiv(size, d) for d in (1, 7, 64, size)] == [triton.cdiv(size, d) for d in (1, 7, 64, size)]
