"""The sum over ranks where a row's bits must not depend on other rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.layers.all_reduce import AllReduce
from weft.ops.backend import Backend

PARTS = (1.0, 1e8, -1e8, 1.0)
"""Parts of four ranks. They add up to 1 only in the order of the ranks."""


class FourRanks:
    """A group whose all-reduce adds in another order."""

    size, rank = 4, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * (PARTS[1] + PARTS[2] + PARTS[0] + PARTS[3])

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x * part for part in PARTS], dim=-1)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_ranks_are_added_in_order(num_rows: int) -> None:
    for backend, want in ((Backend.TORCH, 2.0), (Backend.INVARIANT_TORCH, 1.0)):
        context: Any = SimpleNamespace(
            tp=FourRanks(), dtype=torch.float32, backend=backend, custom_all_reduce=False
        )  # fmt: skip
        sum_over_ranks: Any = AllReduce.__call__
        found = sum_over_ranks.__wrapped__(AllReduce(3, context), torch.ones(num_rows, 3))
        assert found.is_contiguous() and (found == want).all()
