"""The kernel of ``grid_positions``: a program has one patch."""

from __future__ import annotations

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@triton.jit
def _point(place, last, SIDE: tl.constexpr):
    """The grid line before a place, the one behind it, and the share of the latter."""
    exact = place.to(tl.float32) * (SIDE - 1) / tl.maximum(last, 1).to(tl.float32)
    low = tl.floor(exact)
    line = low.to(tl.int32)
    return line, tl.minimum(line + 1, SIDE - 1), exact - low


@triton.jit
def _share(weight, point, share, column, SIZE: tl.constexpr):
    """What a point of the grid adds."""
    return tl.load(weight + point * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32) * share


@jit
def _grid_positions_kernel(
    weight, places, out,
    SIZE: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    patch = tl.program_id(0).to(tl.int64)
    place = places + patch * COLUMNS
    top, bottom, down = _point(tl.load(place), tl.load(place + 2), SIDE)
    left, right, across = _point(tl.load(place + 1), tl.load(place + 3), SIDE)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = _share(weight, top * SIDE + left, (1 - down) * (1 - across), column, SIZE)
    value += _share(weight, top * SIDE + right, (1 - down) * across, column, SIZE)
    value += _share(weight, bottom * SIDE + left, down * (1 - across), column, SIZE)
    value += _share(weight, bottom * SIDE + right, down * across, column, SIZE)
    tl.store(out + patch * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


def grid_positions_triton(weight: Tensor, places: Tensor) -> Tensor:
    """As ``weft.ops.vision_positions.grid_positions``."""
    count, columns = places.shape
    assert weight.is_contiguous() and places.is_contiguous() and places.dtype == torch.int32
    size = weight.shape[1]
    out = torch.empty(count, size, dtype=weight.dtype, device=weight.device)
    _grid_positions_kernel[(count,)](
        weight, places, out, SIZE=size, SIDE=isqrt(len(weight)), COLUMNS=columns, BLOCK=next_power_of_2(size),
        num_warps=4, **early_launch(weight.device),
    )  # fmt: skip
    return out
