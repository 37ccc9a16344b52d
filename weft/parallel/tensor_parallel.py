"""The tensor-parallel group as layers see it: who am I, how many are we, and two collectives.

Job: the interface that layers are written against, and the group of one. Owns: nothing but rank and size.
Does not know: process launching, devices, or which layers are sharded.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorParallel(Protocol):
    """A group of ``size`` ranks, of which this is ``rank``. Collectives must be called by every rank, in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``; may be written in place, so the argument must not be used afterwards."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, concatenated along the last dimension in rank order."""
        ...


class SingleRank:
    """The group of one: both collectives return their argument."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x
