"""Layout of the memory through which ranks exchange rows.

Job: the layout that the kernel and those who allocate agree on. Owns: sizes. Does not know: who allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """No exchanges so far."""
    return torch.zeros(2, MAX_PROGRAMS, dtype=torch.int32, device=device)
