"""One-shot all-reduce over peer memory, with residual addition and RMSNorm.

Job: ``all_reduce_rms_norm`` on GPUs. Owns: the protocol between the ranks' programs. Does not know: layers, groups.

Program p of every rank exchanges its rows with program p of the others, and with nobody else:

1. write the rows to this rank's buffer, in the half that belongs to this exchange (halves alternate);
2. signal: set this program's flag on every other rank to the number of the exchange (release, system scope);
3. wait until all other ranks have signalled here (acquire, system scope);
4. read everybody's rows, sum, add, normalise.

One barrier is enough. A rank overwrites a half two exchanges later. By then it has seen every peer's flag of the
exchange between, and a peer sets that flag only after its launch before has ended, with all its reads.

Early launch stays correct across the barrier. Every program waits for the kernels before it prior to anything else, so
what it signals is complete, and the launch before has ended here. Kernels after this one are released at once; they
wait in turn until this grid has ended. Released early they take room on the multiprocessors while programs here spin. A
release counts only after every program of this grid has started, so no waiting kernel can keep a part of this grid from
starting. And the grid has at most ``MAX_PROGRAMS`` programs, which all run at the same time, so no program of a peer
waits for one here that is not running yet.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.collectives.peer_buffers import MAX_PROGRAMS, PeerBuffers, flag_bytes, rows_of_program
from weft.ops.linear.few_rows import add_parts
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_TILE_VALUES = 8192
"""Values of the rows that a program reads at a time: as many as eight warps hold in registers."""

_MOST_POLLS = 1 << 27
"""A minute or more; a peer that is that late is dead, and the host has noticed. The launch then fails."""


@triton.jit
def _rows(addresses, rank, FLAG_BYTES: tl.constexpr, element: tl.constexpr):
    """Return the address of rank ``rank``'s rows."""
    return (tl.load(addresses + rank) + FLAG_BYTES).to(tl.pointer_type(element))


@triton.jit
def _barrier(
    addresses, number, RANK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, PROGRAMS: tl.constexpr,
    MOST_POLLS: tl.constexpr, TRAP: tl.constexpr,
):  # fmt: skip
    """Signal ``number`` to this program on every other rank, and wait until all of them have signalled it here.

    Each rank's flag has a thread of its own, so that the ways to all ranks are taken at the same time.
    """
    ranks = tl.arange(0, LANES)
    others = (ranks < SIZE) & (ranks != RANK)
    theirs = tl.load(addresses + ranks, mask=ranks < SIZE, other=0).to(tl.pointer_type(tl.int32))
    ours = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32)) + ranks * PROGRAMS + tl.program_id(0)
    numbers = tl.zeros([LANES], dtype=tl.int32) + number
    tl.debug_barrier()  # every thread's rows are written before the signal
    tl.atomic_xchg(theirs + RANK * PROGRAMS + tl.program_id(0), numbers, mask=others, sem="release", scope="sys")
    polls = 0
    behind = -1
    while (behind < 0) & (polls < MOST_POLLS):
        seen = tl.atomic_add(ours, tl.zeros([LANES], dtype=tl.int32), mask=others, sem="acquire", scope="sys")
        behind = tl.min(tl.where(others, seen - numbers, 0), 0)  # both wrap around
        polls += 1
    if TRAP:  # noqa: SIM102 (known to the compiler)
        if behind < 0:
            tl.inline_asm_elementwise(
                "{ trap; mov.u32 $0, $1; }", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
            )
    tl.debug_barrier()  # no thread reads before those that poll have seen all flags


@triton.jit
def _half(exchange, WIDTH: tl.constexpr, PROGRAMS: tl.constexpr, MOST_ROWS: tl.constexpr):
    """Compute where this program's rows begin in the half of the buffer that belongs to an exchange."""
    return ((exchange & 1) * PROGRAMS + tl.program_id(0)).to(tl.int64) * (MOST_ROWS * WIDTH)


@triton.jit
def _scale(weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    return scale


@triton.jit
def _tile(tile, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Compute rows ``[TILE, 1]`` of this program's tile number ``tile``, their offsets in the program's part of the
    buffer, and the mask ``[TILE, BLOCK]`` of elements that exist."""
    local = tile * TILE + tl.arange(0, TILE)[:, None]
    rows = (tl.program_id(0) + local * tl.num_programs(0)).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    return rows, local * WIDTH + columns, (columns < WIDTH) & (rows < num_rows)


@triton.jit
def _share(
    tile, x, here, num_rows, stride_x, stride_part,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a tile of this rank's rows where the others read them."""
    rows, places, inside = _tile(tile, num_rows, WIDTH, BLOCK, TILE)
    values = add_parts(x + rows * stride_x + tl.arange(0, BLOCK)[None, :], inside, stride_part, PARTS)
    tl.store(tl.multiple_of(here + places, [1, ALIGNED]), values.to(here.dtype.element_ty), mask=inside)


@triton.jit
def _sum(
    tile, residual, addresses, half, num_rows, stride_residual, element: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, FLAG_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Read a tile of every rank's rows, sum and add the residual, rounded once."""
    rows, places, inside = _tile(tile, num_rows, WIDTH, BLOCK, TILE)
    values = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    for peer in tl.static_range(SIZE):  # in rank order on every rank: the same bits
        there = _rows(addresses, peer, FLAG_BYTES, element) + half
        place = tl.multiple_of(there + places, [1, ALIGNED])
        values += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if RESIDUAL:
        place = residual + rows * stride_residual + tl.arange(0, BLOCK)[None, :]
        values += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return values.to(element)


@triton.jit
def _finish(
    tile, rounded, scale, y, total, eps, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Write a tile of sums, and normalise it."""
    rows, _, inside = _tile(tile, num_rows, WIDTH, BLOCK, TILE)
    columns = tl.arange(0, BLOCK)[None, :]
    tl.store(total + rows * WIDTH + columns, rounded, mask=inside)
    values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)[:, None]
    tl.store(y + rows * WIDTH + columns, (values * inverse * scale).to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_rows"])
def _all_reduce_norm_kernel(
    x, residual, weight, y, total, addresses, counters, eps, num_rows, stride_x, stride_part, stride_residual,
    RANK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FLAG_BYTES: tl.constexpr, ALIGNED: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr,
    MOST_ROWS: tl.constexpr, PARTS: tl.constexpr, RESIDUAL: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    MOST_POLLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(num_rows, num_programs * TILE)  # 1 if SINGLE
    exchange = tl.load(counters + program) + 1
    half = _half(exchange, WIDTH, PROGRAMS, MOST_ROWS)
    here = _rows(addresses, RANK, FLAG_BYTES, y.dtype.element_ty) + half
    if SINGLE:
        _share(0, x, here, num_rows, stride_x, stride_part, WIDTH, BLOCK, TILE, PARTS, ALIGNED)
    else:
        for tile in range(num_tiles):
            _share(tile, x, here, num_rows, stride_x, stride_part, WIDTH, BLOCK, TILE, PARTS, ALIGNED)
    _barrier(addresses, exchange, RANK, SIZE, LANES, PROGRAMS, MOST_POLLS, EARLY)
    scale = _scale(weight, WIDTH, BLOCK, ZERO_CENTERED)
    if SINGLE:
        rounded = _sum(
            0, residual, addresses, half, num_rows, stride_residual, y.dtype.element_ty,
            SIZE, WIDTH, BLOCK, TILE, FLAG_BYTES, ALIGNED, RESIDUAL,
        )  # fmt: skip
        _finish(0, rounded, scale, y, total, eps, num_rows, WIDTH, BLOCK, TILE)
    else:
        for tile in range(num_tiles):
            rounded = _sum(
                tile, residual, addresses, half, num_rows, stride_residual, y.dtype.element_ty,
                SIZE, WIDTH, BLOCK, TILE, FLAG_BYTES, ALIGNED, RESIDUAL,
            )  # fmt: skip
            _finish(tile, rounded, scale, y, total, eps, num_rows, WIDTH, BLOCK, TILE)
    tl.store(counters + program, exchange)


def all_reduce_rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, peers: PeerBuffers, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape[-2:]
    assert num_rows <= peers.max_rows and width == peers.width and x.stride(-1) == 1
    other = x if residual is None else residual
    assert other.stride(-1) == 1
    y, total = (torch.empty((num_rows, width), dtype=weight.dtype, device=x.device) for _ in range(2))
    if num_rows == 0:
        return y, total
    programs = min(num_rows, MAX_PROGRAMS)
    block, rows_per_program = next_power_of_2(width), cdiv(num_rows, programs)
    tile = max(1, min(next_power_of_2(rows_per_program), _TILE_VALUES // block))
    _all_reduce_norm_kernel[(programs,)](
        x, other, weight, y, total, peers.addresses, peers.counters, eps, num_rows, x.stride(-2), x.stride(0),
        other.stride(-2),
        RANK=peers.rank, SIZE=peers.size, LANES=next_power_of_2(peers.size), WIDTH=width, BLOCK=block,
        FLAG_BYTES=flag_bytes(peers.size), ALIGNED=math.gcd(16, width), PROGRAMS=MAX_PROGRAMS, TILE=tile,
        SINGLE=rows_per_program <= tile, MOST_ROWS=rows_of_program(peers.max_rows),
        PARTS=len(x) if x.dim() == 3 else 1, RESIDUAL=residual is not None, ZERO_CENTERED=zero_centered,
        MOST_POLLS=_MOST_POLLS, num_warps=max(1, min(8, block // 256)),
        **early_launch(x.device),
    )  # fmt: skip
    return y, total
