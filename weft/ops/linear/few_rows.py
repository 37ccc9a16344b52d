"""Shared parts of the kernels for a few rows: the weight rows of a program, and the addition of the splits' sums.

A program computes ``ROWS`` outputs of all tokens, or its split's part of the sums. Each split writes its sums, and the
last split to arrive adds all of them in order. Tokens are padded to a power of two, so that few kernels are compiled.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.collectives.packets import pack_values, send


class CodedRows(NamedTuple):
    """How ``coded_few_rows_hopper.py`` computes a product with very few rows.

    Attributes:
        rows, warps: weight rows and warps of a program.
        held: chunks of a warp that are loaded ahead.
        splits: programs that share the inner dimension.
    """

    rows: int
    warps: int
    held: int
    splits: int = 1


MAX_BLOCKS = 4096
"""Blocks of rows that may be split (more need no splitting)."""


@triton.jit
def rows_of_block(block, width, ROWS: tl.constexpr, GATED: tl.constexpr):
    """The weight rows of a block, gate and up rows taking turns. Rows beyond the end repeat the last one."""
    lanes = tl.arange(0, ROWS)
    if GATED:
        rows = tl.minimum(block * (ROWS // 2) + lanes // 2, width - 1) + lanes % 2 * width
    else:
        rows = tl.minimum(block * ROWS + lanes, width - 1)
    return rows


@triton.jit
def load_inner(pointers, inside, EVEN: tl.constexpr):
    """Load a tile of the inner dimension, with zeros for elements that are not ``inside``. EVEN: all elements are."""
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _store_outputs(
    acc, bias, out, block, num_tokens, width, stride_out,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    sending, ROUTE: tl.constexpr,
):  # fmt: skip
    """Bias and gate, and one rounding; with a route to every rank."""
    if BIAS:
        acc += tl.load(bias + rows_of_block(block, width, ROWS, GATED)).to(tl.float32)[:, None]
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [OUTPUTS, 2, TOKENS]), [0, 2, 1]))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    columns = block * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.arange(0, TOKENS)
    if ROUTE is None:
        inside = (columns < width)[:, None] & (tokens < num_tokens)[None, :]
        offsets = tokens.to(tl.int64)[None, :] * stride_out + columns[:, None]
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)
    else:
        rows, flags, areas = sending
        words = pack_values(acc, out.dtype.element_ty)
        places = (block * words.shape[0] + tl.arange(0, words.shape[0]))[:, None]
        inside = (places < ROUTE.words) & (tokens < num_tokens)[None, :]
        send(words, places, rows, flags, inside, areas, ROUTE)


@triton.jit
def add_parts(places, inside, stride, PARTS: tl.constexpr):
    """Values that a product has left in ``PARTS`` parts, ``stride`` apart, added in order."""
    values = tl.load(places, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        values += tl.load(places + part * stride, mask=inside, other=0.0)
    return values


@triton.jit
def add_splits(
    acc, bias, out, partial, arrivals, place, block, split, num_tokens, width, stride_out,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    sending=None, ROUTE: tl.constexpr = None,
):  # fmt: skip
    """Turn a split's sums ``[ROWS, TOKENS]`` into the outputs of its block; ``place``: the programs that share them.

    With a route they are sent: ``sending`` is the tokens' rows and flags, ``[1, TOKENS]``, and every rank's area.
    """
    if SPLITS == 1:
        _store_outputs(acc, bias, out, block, num_tokens, width, stride_out, TOKENS, ROWS, GATED, BIAS, sending, ROUTE)
    else:
        tile = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        parts = partial + place * (SPLITS * ROWS * TOKENS)
        tl.store(parts + split * (ROWS * TOKENS) + tile, acc)
        tl.debug_barrier()  # all of this program's sums are written before it is counted
        if tl.atomic_add(arrivals + place, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + place, 0)
            total = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
            for part in range(SPLITS):
                total += tl.load(parts + part * (ROWS * TOKENS) + tile, cache_modifier=".cg")
            _store_outputs(
                total, bias, out, block, num_tokens, width, stride_out, TOKENS, ROWS, GATED, BIAS, sending, ROUTE
            )


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Programs that have finished, per block; every launch leaves zeros behind. Launches on one stream share it."""
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


def workspace(blocks: int, splits: int, rows: int, tokens: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the sums and the counters of ``splits`` programs of each block; stand-ins if there is one split."""
    if splits == 1:
        return out, out
    assert blocks <= MAX_BLOCKS
    sums = torch.empty(blocks * splits * rows * tokens, dtype=torch.float32, device=out.device)
    return sums, _arrivals(out.device)
