"""All-reduce of few rows over peer memory without a barrier, with residual addition and RMSNorm.

Job: ``all_reduce_rms_norm`` on GPUs for up to ``MAX_PROGRAMS`` rows. Owns: the exchange. Does not know: layers, groups,
the packets' format (``packets.py``).

The low-latency protocol (LL) of NCCL: every rank writes its rows straight into every rank's memory. Packets arrive
whole, so no barrier is needed, and a sum takes one way over NVLink instead of three. Twice the bytes are moved, so it
is for few rows. Either this kernel sends the rows, or the kernel before it has (``SentRows``), and this one receives.

Program p of every rank exchanges row p with program p of the others. Halves of the memory alternate as in
``signalled.py``, so that an exchange overwrites nothing that a peer still reads. A rank writes a half again two
exchanges later. By then it has seen every peer's packets of the exchange between, and a peer sends these only after its
previous launch has ended. Early launches are safe for the reasons given in ``signalled.py``.

If the previous kernel has sent the rows and passed on its start, a program waits for the packets instead of the end of
that kernel with all its writes over NVLink. Every program of the previous kernel has waited by then, so results of
older kernels are visible. This kernel writes only memory that was allocated before the previous kernel's launch, so no
program of the previous kernel reads this memory. The wait comes last, so that this kernel's end still means the end of
all before it.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from weft.ops.collectives.packets import (
    areas_of,
    flags_of,
    pack,
    pack_values,
    packets_at,
    place_of,
    route_to,
    send,
    unpack,
)
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows, takes_packets
from weft.ops.linear.few_rows import add_parts
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2

_MOST_POLLS = 1 << 26
"""A minute or more; see ``signalled.py``."""
_TRAPS = tl.constexpr(not knobs.runtime.interpret)
"""The interpreter knows no assembly. Triton 3.6 and 3.7 compile no loop of which only one result is used."""


@triton.jit
def _receive(
    area, flag, inside, LANES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    MOST_POLLS: tl.constexpr,
):  # fmt: skip
    """Every rank's packets, ``[LANES, BLOCK]`` int64, once all of them have come."""
    lanes = tl.arange(0, LANES)[:, None]
    wanted = inside[None, :] & (lanes < SIZE)
    places = area + lanes * STRIDE + tl.arange(0, BLOCK)[None, :]
    polls = 0
    missing = 1
    packed = tl.zeros([LANES, BLOCK], dtype=tl.int64)
    while (missing > 0) & (polls < MOST_POLLS):
        packed = tl.load(places, mask=wanted, other=0, volatile=True)
        late = wanted & ((packed >> 32).to(tl.int32) != flag)
        missing = tl.max(tl.max(late.to(tl.int32), 1), 0)
        polls += 1
    if _TRAPS:  # noqa: SIM102 (known to the compiler)
        if missing > 0:
            tl.inline_asm_elementwise(
                "{ trap; mov.u32 $0, $1; }", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
            )
    return packed


@triton.jit
def _receive_and_norm(
    row, flag, residual, weight, y, total, addresses, eps, stride_residual,
    LANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUTE: tl.constexpr, RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, MOST_POLLS: tl.constexpr,
):  # fmt: skip
    """Compute one row, from its packets on. ``stride_residual`` counts words."""
    element = y.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < ROUTE.words
    word = tl.pointer_type(tl.int32)
    added = tl.zeros([BLOCK], dtype=tl.int32)
    if RESIDUAL:
        place = residual.to(word) + row * stride_residual + columns
        added = tl.load(place, mask=inside, other=0, cache_modifier=".cg")
    scale_first, scale_second = unpack(tl.load(weight.to(word) + columns, mask=inside, other=0), element)
    area = packets_at(addresses, ROUTE.rank, ROUTE) + place_of(flag, 0, row, ROUTE)
    SIZE: tl.constexpr = ROUTE.size
    STRIDE: tl.constexpr = ROUTE.programs * ROUTE.words
    packets = _receive(area, flag, inside, LANES, SIZE, BLOCK, STRIDE, MOST_POLLS)
    first, second = unpack(packets.to(tl.int32), element)
    more_first, more_second = unpack(added, element)
    sums = pack(tl.sum(first, 0) + more_first, tl.sum(second, 0) + more_second, element)
    tl.store(total.to(word) + row * ROUTE.words + columns, sums, mask=inside)
    first, second = unpack(sums, element)
    inverse = tl.rsqrt(tl.sum(first * first + second * second, 0) / WIDTH + eps)
    if ZERO_CENTERED:
        scale_first += 1.0
        scale_second += 1.0
    normed = pack(first * inverse * scale_first, second * inverse * scale_second, element)
    tl.store(y.to(word) + row * ROUTE.words + columns, normed, mask=inside)


@jit
def _packed_all_reduce_kernel(
    x, residual, weight, y, total, addresses, counters, eps, stride_x, stride_part, stride_residual,
    LANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ROUTE: tl.constexpr,
    RESIDUAL: tl.constexpr, ZERO_CENTERED: tl.constexpr, MOST_POLLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row. ``stride_residual`` counts words, and without parts ``stride_x`` too."""
    enter(EARLY)
    element = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < ROUTE.words
    if PARTS > 1:
        VALUES: tl.constexpr = BLOCK if element == tl.float32 else 2 * BLOCK
        place = tl.arange(0, VALUES)
        mine = pack_values(add_parts(x + row * stride_x + place, place < WIDTH, stride_part, PARTS), element)
    else:
        mine = tl.load(x.to(tl.pointer_type(tl.int32)) + row * stride_x + columns, mask=inside, other=0)
    flag = flags_of(counters, row, ROUTE)
    send(mine, columns, row, flag, inside, areas_of(addresses, ROUTE), ROUTE)
    _receive_and_norm(
        row, flag, residual, weight, y, total, addresses, eps, stride_residual,
        LANES, WIDTH, BLOCK, ROUTE, RESIDUAL, ZERO_CENTERED, MOST_POLLS,
    )  # fmt: skip
    tl.store(counters + ROUTE.programs + row, flag)


@jit
def _receive_norm_kernel(
    residual, weight, y, total, addresses, counters, eps, stride_residual,
    LANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUTE: tl.constexpr, RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, MOST_POLLS: tl.constexpr, PASSED_ON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row, which the kernel before sends."""
    release(EARLY)
    if not PASSED_ON:
        wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    flag = flags_of(counters, row, ROUTE)
    _receive_and_norm(
        row, flag, residual, weight, y, total, addresses, eps, stride_residual,
        LANES, WIDTH, BLOCK, ROUTE, RESIDUAL, ZERO_CENTERED, MOST_POLLS,
    )  # fmt: skip
    if PASSED_ON:
        wait(EARLY)
    tl.store(counters + ROUTE.programs + row, flag)


def packed_all_reduce_rms_norm(
    x: Tensor | SentRows,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    peers: PeerBuffers,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """``all_reduce_rms_norm`` of ``weft/ops/collectives`` for up to ``MAX_PROGRAMS`` rows of whole words."""
    y, total = x.room if isinstance(x, SentRows) else weight.new_empty((2, *x.shape[-2:]))
    per_word, (num_rows, width) = 4 // y.element_size(), y.shape
    other, route = y if residual is None else residual, route_to(peers, y.dtype)
    block, lanes = next_power_of_2(route.words), next_power_of_2(peers.size)
    given = (other, weight, y, total, peers.addresses, peers.counters, eps)
    options = {
        "LANES": lanes, "WIDTH": width, "BLOCK": block, "ROUTE": route, "RESIDUAL": residual is not None,
        "ZERO_CENTERED": zero_centered, "MOST_POLLS": _MOST_POLLS, "num_warps": max(1, min(8, block * lanes // 256)),
    }  # fmt: skip
    if isinstance(x, SentRows):
        stride = other.stride(0) // per_word
        _receive_norm_kernel[(num_rows,)](*given, stride, PASSED_ON=x.passed_on, **options, **early_launch(y.device))
    else:
        parts = len(x) if x.dim() > 2 else 1
        strides = x.stride(-2) if parts > 1 else x.stride(-2) // per_word, x.stride(0), other.stride(0) // per_word
        _packed_all_reduce_kernel[(num_rows,)](x, *given, *strides, PARTS=parts, **options, **early_launch(y.device))
    return y, total


def fits_packed(x: Tensor, residual: Tensor | None, weight: Tensor, size: int) -> bool:
    """Whether these are few rows, of whole words, for ``size`` ranks."""
    rows = [x] if residual is None else [x, residual]
    per_word = 4 // weight.element_size()
    is_whole = all(row.stride(-2) % per_word == 0 for row in rows)
    is_aligned = all(tensor.data_ptr() % 4 == 0 for tensor in (*rows, weight))
    is_one_type = x.dim() > 2 or x.dtype == weight.dtype
    num_rows, width = x.shape[-2:]
    return takes_packets(num_rows, width, weight.dtype, size) and is_whole and is_aligned and is_one_type
