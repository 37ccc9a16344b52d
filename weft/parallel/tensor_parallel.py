"""The tensor-parallel group as layers see it: rank, size, collectives.

Job: the interface that layers and the runner use, and the group of one. Does not know: process launching, devices, or
which layers are sharded.

Every rank must compute bitwise the same replicated values (residual stream, router, logits). Ranks that choose
different experts or tokens compute different models. The values are equal for two reasons. A sum is computed once and
copied, or computed by every rank in the same order. And the same kernels run on the same values everywhere else.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class TensorParallel(Protocol):
    """A group of ``size`` ranks, seen from ``rank``. Every rank must call the collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, bitwise the same on every rank. May overwrite ``x``, so do not use ``x``
        afterwards."""
        ...

    def peer_memory(self, num_bytes: int) -> Tensor | None:
        """Addresses ``[size]`` int64, on the device, of a zeroed buffer of every rank that this rank can read and
        write. Returns None if the ranks have no such memory; the log says why. Each group allocates the buffer once and
        keeps it until the group is closed."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, concatenated along the last dimension in rank order."""
        ...

    def least(self, value: int) -> int:
        """The minimum of every rank's ``value``, on the host. Waits for the device, so no step uses it."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Write rank 0's ``x``, which is contiguous, into every rank's. Returns it. No step uses it."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether collectives of layers reach no other rank at the moment."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Make collectives of layers local in the body. Their results have the right shapes and memory, and meaningless
        values. A start uses it to measure a step where a failure may hit one rank alone."""
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

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    is_alone = True

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()
