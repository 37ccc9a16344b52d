"""All-reduce of few rows over peer memory without a barrier, with residual addition and RMSNorm.

Job: ``all_reduce_rms_norm`` on GPUs for up to ``MAX_PROGRAMS`` rows. Owns: the packets. Does not know: layers, groups.

The low-latency protocol (LL) of NCCL: every rank writes its rows straight into every rank's memory, as packets of 8
bytes: 4 bytes of data, and a flag of 4 bytes, which is the number of the exchange. A packet arrives whole, so a reader
that sees the flag has the data, without a barrier: a sum takes one way over NVLink instead of three. Twice the bytes
are moved, so it is for few rows.

Program p of every rank exchanges row p with program p of the others. Halves of the memory alternate as in
``all_reduce.py``, and for the same reason one exchange cannot overwrite what a peer still reads: a rank writes a half
again two exchanges later, when it has seen every peer's packets of the exchange between, which a peer sends only after
its launch before has ended. What is said there of early launches holds here as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.peer_buffers import MAX_PROGRAMS, PeerBuffers, packets_offset
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2

_MOST_BYTES, _MOST_BYTES_OF_TWO = 128 * 2**10, 512 * 2**10
"""Of a message: with four ranks packets were faster than a barrier up to there, with two up to ``MAX_PROGRAMS`` rows of
4 KiB, which is all that there is room for; other numbers of ranks were not measured."""

_MOST_POLLS = 1 << 26
"""A minute or more; see ``all_reduce.py``."""


@triton.jit
def _unpack(words, element: tl.constexpr):
    """Words of 4 bytes as the float32 values of their first and second half; of float32, the second is zero."""
    if element == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(element, bitcast=True).to(tl.float32)
        second = ((words >> 16) & 0xFFFF).to(tl.int16).to(element, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _pack(first, second, element: tl.constexpr):
    """The inverse, rounded."""
    if element == tl.float32:
        words = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(element).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(element).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def _packets(addresses, rank, OFFSET: tl.constexpr):
    """Where rank ``rank`` receives packets."""
    return tl.multiple_of((tl.load(addresses + rank) + OFFSET).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _receive(
    area, flag, inside, LANES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    MOST_POLLS: tl.constexpr, TRAP: tl.constexpr,
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
    if TRAP:  # noqa: SIM102 (known to the compiler)
        if missing > 0:
            tl.inline_asm_elementwise(
                "{ trap; mov.u32 $0, $1; }", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
            )
    return packed


@jit
def _packed_all_reduce_kernel(
    x, residual, weight, y, total, addresses, counters, eps, stride_x, stride_residual,
    RANK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr, PROGRAMS: tl.constexpr, RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, MOST_POLLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row. ``stride_x`` and ``stride_residual`` count words."""
    enter(EARLY)
    element = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WORDS
    word = tl.pointer_type(tl.int32)
    mine = tl.load(x.to(word) + row * stride_x + columns, mask=inside, other=0)
    counter = counters + PROGRAMS + row
    flag = tl.load(counter) + 1
    half = ((flag & 1) * (SIZE * PROGRAMS) + row) * WORDS  # of rank 0's rows; those of the next rank PROGRAMS later
    packed = (flag.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        area = _packets(addresses, peer, OFFSET)
        tl.store(area + half + RANK * (PROGRAMS * WORDS) + columns, packed, mask=inside)
    added = tl.zeros([BLOCK], dtype=tl.int32)
    if RESIDUAL:
        added = tl.load(residual.to(word) + row * stride_residual + columns, mask=inside, other=0)
    scale_first, scale_second = _unpack(tl.load(weight.to(word) + columns, mask=inside, other=0), element)
    packed = _receive(
        _packets(addresses, RANK, OFFSET) + half, flag, inside, LANES, SIZE, BLOCK, PROGRAMS * WORDS, MOST_POLLS, EARLY
    )
    tl.store(counter, flag)
    first, second = _unpack(packed.to(tl.int32), element)
    more_first, more_second = _unpack(added, element)
    sums = _pack(tl.sum(first, 0) + more_first, tl.sum(second, 0) + more_second, element)
    tl.store(total.to(word) + row * WORDS + columns, sums, mask=inside)
    first, second = _unpack(sums, element)
    inverse = tl.rsqrt(tl.sum(first * first + second * second, 0) / WIDTH + eps)
    if ZERO_CENTERED:
        scale_first += 1.0
        scale_second += 1.0
    normed = _pack(first * inverse * scale_first, second * inverse * scale_second, element)
    tl.store(y.to(word) + row * WORDS + columns, normed, mask=inside)


def packed_all_reduce_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, peers: PeerBuffers, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """``all_reduce_rms_norm`` of ``weft/ops/all_reduce.py`` for up to ``MAX_PROGRAMS`` rows of whole words."""
    num_rows, width = x.shape
    per_word = 4 // x.element_size()
    other = x if residual is None else residual
    y, total = (torch.empty((num_rows, width), dtype=x.dtype, device=x.device) for _ in range(2))
    words = width // per_word
    block, lanes = next_power_of_2(words), next_power_of_2(peers.size)
    _packed_all_reduce_kernel[(num_rows,)](
        x, other, weight, y, total, peers.addresses, peers.counters, eps,
        x.stride(0) // per_word, other.stride(0) // per_word,
        RANK=peers.rank, SIZE=peers.size, LANES=lanes, WIDTH=width, WORDS=words, BLOCK=block,
        OFFSET=packets_offset(peers.size, width, x.dtype, peers.max_rows), PROGRAMS=MAX_PROGRAMS,
        RESIDUAL=residual is not None, ZERO_CENTERED=zero_centered, MOST_POLLS=_MOST_POLLS,
        num_warps=max(1, min(8, block * lanes // 256)), **early_launch(x.device),
    )  # fmt: skip
    return y, total


def fits_packed(x: Tensor, residual: Tensor | None, weight: Tensor, size: int) -> bool:
    """Whether these are few rows, of whole words, for ``size`` ranks."""
    per_word = 4 // x.element_size()
    rows = [x] if residual is None else [x, residual]
    is_whole = x.shape[1] % per_word == 0 and all(row.stride(0) % per_word == 0 for row in rows)
    is_aligned = all(tensor.data_ptr() % 4 == 0 for tensor in (*rows, weight))
    most_bytes = _MOST_BYTES_OF_TWO if size == 2 else _MOST_BYTES
    is_few = x.shape[0] <= MAX_PROGRAMS and x.numel() * x.element_size() <= most_bytes
    return is_few and is_whole and is_aligned and weight.dtype == x.dtype
