"""The tensor-parallel group as layers see it: rank, size, collectives.

Job: the interface that layers and the runner are written against, and the group of one. Does not know: process
launching, devices, or which layers are sharded.

Every rank must compute bitwise the same replicated values (residual stream, router, logits): ranks that choose other
experts or other tokens compute another model. They do, because a sum is formed once and copied, or formed by every rank
in the same order, and because the same kernels run on the same values everywhere else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class TensorParallel(Protocol):
    """A group of ``size`` ranks, of which this is ``rank``. Collectives must be called by every rank, in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, bitwise the same on every rank; may be written in place, so the argument must
        not be used afterwards."""
        ...

    def peer_memory(self, num_bytes: int) -> Tensor | None:
        """Addresses ``[size]`` int64, on the device, of a zeroed buffer of every rank that this rank can read and
        write; None if they have no such memory (the log says why). A group has one, which lives as long as it."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, concatenated along the last dimension in rank order."""
        ...

    def least(self, value: int) -> int:
        """The least of every rank's ``value``, on the host. For the start: it waits for the device."""
        ...

    @property
    def is_alone(self) -> bool:
        """Collectives of layers reach no other rank."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """In the body, collectives of layers give results of the right shape and memory without another rank, and with
        meaningless values: what a step needs is found where it may fail on one rank and not on another."""
        ...


class SingleRank:
    """The group of one: collectives return their argument."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def peer_memory(self, num_bytes: int) -> Tensor | None:
        return None

    def least(self, value: int) -> int:
        return value

    is_alone = True

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()
