"""Packets of the low-latency protocol: how rows travel to every rank without a barrier.

Job: the format, and sending from inside any kernel that ends with this rank's part of a sum. Owns: where packets go and
their flags. Does not know: who receives (``packed.py``).

A packet is 8 bytes: 4 bytes of data, and a flag of 4 bytes, which is the number of the exchange. It arrives whole, so a
reader that sees the flag has the data. Row p has its own count of exchanges; the receiver counts, when it has all of
the row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.ops.collectives.peer_buffers import MAX_PROGRAMS, PeerBuffers, packets_offset


class Route(NamedTuple):
    """Compile-time parameters of a kernel that sends packets.

    Attributes:
        rank, size: of ``PeerBuffers``.
        programs: ``MAX_PROGRAMS``.
        words: of 4 bytes, in a row.
        offset: the byte of a rank's buffer at which packets begin.
    """

    rank: int
    size: int
    programs: int
    words: int
    offset: int


def route_to(peers: PeerBuffers, dtype: torch.dtype) -> Route:
    """For rows of ``peers.width`` of ``dtype``."""
    offset = packets_offset(peers.size, peers.width, dtype, peers.max_rows)
    return Route(peers.rank, peers.size, MAX_PROGRAMS, peers.width * dtype.itemsize // 4, offset)


@triton.jit
def unpack(words, element: tl.constexpr):
    """Words of 4 bytes as the float32 values of their first and second half; of float32, the second is zero."""
    if element == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(element, bitcast=True).to(tl.float32)
        second = ((words >> 16) & 0xFFFF).to(tl.int16).to(element, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def pack(first, second, element: tl.constexpr):
    """The inverse, rounded."""
    if element == tl.float32:
        words = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(element).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(element).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def pack_values(values, element: tl.constexpr):
    """The words of float32 values ``[N]`` or ``[N, M]``, neighbours of the first dimension in one word."""
    if element == tl.float32:
        words = pack(values, values, element)
    elif len(values.shape) == 1:
        first, second = tl.split(tl.reshape(values, [values.shape[0] // 2, 2]))
        words = pack(first, second, element)
    else:
        pairs = tl.reshape(values, [values.shape[0] // 2, 2, values.shape[1]])
        first, second = tl.split(tl.permute(pairs, [0, 2, 1]))
        words = pack(first, second, element)
    return words


@triton.jit
def packets_at(addresses, rank, ROUTE: tl.constexpr):
    """Return the address at which rank ``rank`` receives packets."""
    return tl.multiple_of((tl.load(addresses + rank) + ROUTE.offset).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def areas_of(addresses, ROUTE: tl.constexpr):
    """Load the addresses at which the ranks receive packets: a tuple, empty without a route. No kernel writes them."""
    areas = ()
    if ROUTE is not None:
        SIZE: tl.constexpr = ROUTE.size
        for rank in tl.static_range(SIZE):
            areas = areas + (packets_at(addresses, rank, ROUTE),)  # type: ignore[assignment]  # noqa: RUF005
    return areas


@triton.jit
def flags_of(counters, rows, ROUTE: tl.constexpr):
    """The flags of the packets of ``rows``; anything without a route. The receiver of the exchange before has written
    them."""
    flags = rows
    if ROUTE is not None:
        flags = tl.load(counters + ROUTE.programs + rows, cache_modifier=".cg") + 1
    return flags


@triton.jit
def place_of(flags, rank, rows, ROUTE: tl.constexpr):
    """Compute where the packets of ``rows`` of rank ``rank`` begin. Halves of the memory alternate."""
    return ((flags & 1) * (ROUTE.size * ROUTE.programs) + rank * ROUTE.programs + rows) * ROUTE.words


@triton.jit
def send(words, columns, rows, flags, inside, areas, ROUTE: tl.constexpr):
    """Send words ``columns`` of ``rows`` to every rank, this one too; all of one shape, or broadcast to it."""
    packets = (flags.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    places = place_of(flags, ROUTE.rank, rows, ROUTE) + columns
    for rank in tl.static_range(len(areas)):
        tl.store(areas[rank] + places, packets, mask=inside)
