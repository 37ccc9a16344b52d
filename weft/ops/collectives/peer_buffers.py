"""Layout of the memory through which ranks exchange rows.

Job: the layout that the kernels and those who allocate agree on, and which rows go by packets. Owns: sizes. Does not
know: who allocates.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

MAX_PROGRAMS = 128
"""Programs of one launch: fewer than a GPU has multiprocessors, so that all of them run at the same time."""


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Memory that every rank of a group can read and write.

    One rank's buffer holds flags, then rows::

        flags   [size, MAX_PROGRAMS] int32       flags[r, p]: the last exchange that program p of rank r signalled here
        rows    [2, MAX_PROGRAMS, rows of a program, width]    of even and of odd exchanges
        packets [2, size, MAX_PROGRAMS, bytes of a row / 4] int64    of even and of odd exchanges of few rows, see
                ``triton/all_reduce_packed.py``

    Attributes:
        addresses: ``[size]`` int64 on the device: where each rank's buffer is, as seen from here.
        counters: ``[2, MAX_PROGRAMS]`` int32: exchanges of each program so far, with a barrier and by packets.
        rank, size: place in the group.
        width: columns of a row.
        max_rows: rows for which there is room, above which the group's own all-reduce is to be used.
    """

    addresses: Tensor
    counters: Tensor
    rank: int
    size: int
    width: int
    max_rows: int


_MOST_BYTES, _MOST_BYTES_OF_TWO = 128 * 2**10, 512 * 2**10
"""Most bytes of a message that is sent in packets. With four ranks packets were faster than a barrier up to this size.
With two ranks they were faster up to ``MAX_PROGRAMS`` rows of 4 KiB, the size of the buffer. Other numbers of ranks
were not measured."""


def takes_packets(num_rows: int, width: int, dtype: torch.dtype, size: int) -> bool:
    """Whether rows go by packets between ``size`` ranks: few ones, of whole words."""
    row_bytes = width * dtype.itemsize
    is_few = num_rows <= MAX_PROGRAMS and num_rows * row_bytes <= (_MOST_BYTES_OF_TWO if size == 2 else _MOST_BYTES)
    return is_few and row_bytes % 4 == 0


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows ``[T, width]`` that a kernel sends to every rank as packets, this rank's part of a sum. The next operation
    has to be the ``all_reduce_rms_norm`` that receives them.

    Attributes:
        room: ``[2, T, width]`` for its results, allocated before that kernel was launched.
        passed_on: that kernel's programs let the next kernel start when they have waited, not before.
    """

    room: Tensor
    passed_on: bool

    @property
    def shape(self) -> torch.Size:
        """``(T, width)``."""
        return self.room.shape[1:]

    @classmethod
    def to(cls, peers: PeerBuffers, num_rows: int, dtype: torch.dtype, *, passed_on: bool = True) -> Self:
        return cls(torch.empty((2, num_rows, peers.width), dtype=dtype, device=peers.counters.device), passed_on)


def flag_bytes(size: int) -> int:
    """Bytes of the flags of a group of ``size``."""
    return size * MAX_PROGRAMS * 4


def rows_of_program(max_rows: int) -> int:
    """Rows for which one program has room."""
    return -(-max_rows // MAX_PROGRAMS)


def buffer_bytes(size: int, width: int, dtype: torch.dtype, max_rows: int) -> int:
    """Bytes of one rank's buffer."""
    packets = 2 * size * MAX_PROGRAMS * 2 * width * dtype.itemsize
    return packets_offset(size, width, dtype, max_rows) + packets


def packets_offset(size: int, width: int, dtype: torch.dtype, max_rows: int) -> int:
    """The byte at which the packets begin: aligned to 16."""
    rows = 2 * MAX_PROGRAMS * rows_of_program(max_rows) * width * dtype.itemsize
    return -(-(flag_bytes(size) + rows) // 16) * 16


def make_counters(device: torch.device) -> Tensor:
    return torch.zeros(2, MAX_PROGRAMS, dtype=torch.int32, device=device)
