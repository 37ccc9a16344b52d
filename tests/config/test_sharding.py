"""Shares of a dimension: even, or refused; few heads are replicated."""

from __future__ import annotations

import pytest
import torch

from weft.config.sharding import divide, head_range
from weft.errors import ConfigError
from weft.parallel.tensor_parallel import SingleRank


def test_divide() -> None:
    assert divide(12, 4, "heads") == 3
    with pytest.raises(ConfigError, match=r"heads=10 is not divisible by tensor_parallel_size=4; choose"):
        divide(10, 4, "heads")


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_head_ranges_partition_the_heads(size: int) -> None:
    assert [h for rank in range(size) for h in head_range(6, rank, size, "heads")] == list(range(6))


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (2, 4), (2, 8), (3, 6)])
def test_few_heads_are_replicated_over_neighbouring_ranks(heads: int, size: int) -> None:
    owners = [list(head_range(heads, rank, size, "heads")) for rank in range(size)]
    assert owners == [[rank * heads // size] for rank in range(size)]


def test_heads_that_can_be_neither_split_nor_replicated() -> None:
    with pytest.raises(ConfigError, match=r"heads=4 is not divisible by tensor_parallel_size=3"):
        head_range(4, 0, 3, "heads")
    with pytest.raises(ConfigError, match=r"heads=2 cannot be replicated evenly over tensor_parallel_size=3"):
        head_range(2, 0, 3, "heads")


def test_the_group_of_one_does_nothing() -> None:
    x = torch.ones(3)
    tp = SingleRank()
    assert (tp.rank, tp.size) == (0, 1)
    assert tp.all_reduce(x) is x and tp.all_gather(x) is x
