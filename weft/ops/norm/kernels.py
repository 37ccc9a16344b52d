"""Kernels of the norms in ``weft/ops/norm``."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.linear.few_rows import add_parts
from weft.ops.norm import (
    gated_group_norm,
    gated_rms_norm,
    mean_square,
    rms_norm,
    scale_by_mean_square,
    split_rms_norm,
)
from weft.ops.triton.early_launch import ALWAYS, early_launch, enter, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.tile_table import choose_tile


@jit
def _rms_norm_kernel(
    x, residual, weight, y, total, eps, stride_x, stride_part, stride_residual,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)
    values = add_parts(x + row * stride_x + columns, mask, stride_part, PARTS).to(y.dtype.element_ty)
    if RESIDUAL:
        values = values + tl.load(residual + row * stride_residual + columns, mask=mask, other=0.0)
        tl.store(total + row * WIDTH + columns, values, mask=mask)
    values = values.to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    tl.store(y + row * WIDTH + columns, (values * inverse * scale).to(y.dtype.element_ty), mask=mask)


@launches(rms_norm, invariant={"as_parts": True})
def rms_norm_triton(
    x, weight, eps, *, zero_centered, residual, as_parts: bool = False
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``rms_norm`` of ``weft/ops/norm``. ``as_parts``: add whole rows in the order in which partial sums would be."""
    width, like = x.shape[-1], x if residual is None else residual
    parts = len(x) if x.dim() > like.dim() else 1
    rows, other = x.reshape(-1, width), like.reshape(-1, width)
    assert rows.stride(1) == other.stride(1) == 1
    y = torch.empty(like.shape, dtype=like.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    block, count = next_power_of_2(width), rows.shape[0] // parts
    part = count * rows.stride(0) if parts > 1 else 0
    _rms_norm_kernel[(count,)](
        rows, other, weight, y, total, eps, rows.stride(0), part, other.stride(0),
        WIDTH=width, PARTS=parts, ZERO_CENTERED=zero_centered, RESIDUAL=residual is not None, BLOCK=block,
        num_warps=max(1, min(8, block // (128 if parts > 1 or as_parts else 256))), **early_launch(x.device),
    )  # fmt: skip
    return y if residual is None else (y, total)


class Tile(NamedTuple):
    """Elements of a program (as many whole rows as they hold), warps, and a limit on registers per thread.

    A generous limit is for speed, not for memory: left alone, the compiler saves registers by reading the gate after
    the reduction, and the program waits for memory twice.
    """

    elements: int
    warps: int
    max_registers: int | None


# By number of rows (tokens times heads; 32 heads in Qwen3-Next), see benchmarks/kernels/rows.py. Few rows: small
# programs spread over the multiprocessors. Many: several rows per thread share its addresses and its piece of weight.
TILES = {2048: Tile(1024, 4, None), 1 << 30: Tile(2048, 4, 64)}


@jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x, gate, weight, out, num_rows, stride_gate, eps,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, SILU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of ``x [num_rows, V]``; row r's gate is head ``r % H`` of token ``r // H``."""
    enter(EARLY)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_v = tl.arange(0, BLOCK_V)
    mask = (rows < num_rows)[:, None] & (o_v < V)[None, :]
    inside = rows.to(tl.int64)[:, None] * V + o_v[None, :]
    gates = ((rows // H).to(tl.int64) * stride_gate + rows % H * V)[:, None] + o_v[None, :]
    b_x = tl.load(x + inside, mask=mask, other=0.0)
    b_gate = tl.load(gate + gates, mask=mask, other=0.0)
    b_weight = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_x, b_gate = b_x.to(tl.float32), b_gate.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)
    y = b_x * scale[:, None] * b_weight[None, :] * sigmoid(b_gate)
    if SILU:
        y *= b_gate
    tl.store(out + inside, y.to(out.dtype.element_ty), mask=mask)


@launches(gated_rms_norm, invariant={"tile": Tile(2048, 4, 64)})
def gated_rms_norm_triton(x, gate, weight, eps, *, activation, tile: Tile | None = None) -> Tensor:
    """Triton kernel of ``gated_rms_norm``.

    ``x`` is contiguous. A three-dimensional gate ``[T, HV, V]`` may be a slice of a wider projection (strided tokens).
    ``tile`` overrides the choice by ``TILES`` (tests and measurements).
    """
    assert x.is_contiguous() and x.shape == gate.shape, f"x {tuple(x.shape)}, gate {tuple(gate.shape)}"
    width, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    assert gate.stride(-1) == 1 and (num_heads == 1 or gate.stride(1) == width), f"gate strides {gate.stride()}"
    num_rows = x.numel() // width
    out = x.new_empty(x.shape)
    if num_rows:
        tile = tile or choose_tile(TILES, num_rows)
        block_v = next_power_of_2(width)
        rows = max(1, tile.elements // block_v)
        _gated_rms_norm_kernel[(cdiv(num_rows, rows),)](
            x, gate, weight, out, num_rows, gate.stride(0), eps,
            H=num_heads, V=width, ROWS=rows, BLOCK_V=block_v, SILU=activation == "silu",
            num_warps=tile.warps, maxnreg=tile.max_registers,
            **early_launch(x.device),
        )  # fmt: skip
    return out


@jit(do_not_specialize_on_alignment=["state_slots"])
def _group_norm_kernel(
    x, gate, weight, state_slots, out, stride_gate, eps,
    C: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr,
    HAS_SLOTS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Channels of one group of one row; with slots, rows without one become zeros or are kept."""
    release(EARLY, ALWAYS)
    i_row = tl.program_id(1).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    mask = inside < GROUP
    channels = tl.program_id(0) * GROUP + inside
    p_out = out + i_row * C + channels
    if NORM:
        b_weight = tl.load(weight + channels, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)
    if HAS_SLOTS:  # noqa: SIM102 (known to the compiler, so not one condition with the next)
        if tl.load(state_slots + i_row) == 0:
            if not KEEP:
                tl.store(p_out, tl.zeros([BLOCK], out.dtype.element_ty), mask=mask)
            return
    y = tl.load(x + i_row * C + channels, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(gate + i_row * stride_gate + channels, mask=mask, other=0.0).to(tl.float32)
    factor *= sigmoid(factor)
    if not NORM_FIRST:
        y *= factor
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, 0) / GROUP + eps) * b_weight
    if NORM_FIRST:
        y *= factor
    tl.store(p_out, y.to(out.dtype.element_ty), mask=mask)


@launches(gated_group_norm, invariant={})
def gated_group_norm_triton(
    x, gate, weight, eps, num_groups, *, norm_before_gate, state_slots: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Triton kernel of ``gated_group_norm``. With ``state_slots [N]``, rows with slot 0 are zero, or left as they are
    in a given ``out``."""
    num_rows, num_channels = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1 and x.shape == gate.shape
    keep, out = out is not None, x.new_empty(x.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if weight is None:
        num_groups = -(-num_channels // 1024)  # any split does
        while num_channels % num_groups:
            num_groups += 1
    group = num_channels // num_groups
    if num_rows:
        block = next_power_of_2(group)
        _group_norm_kernel[(num_groups, num_rows)](
            x, gate, weight, state_slots, out, gate.stride(0), eps,
            C=num_channels, GROUP=group, BLOCK=block, NORM=weight is not None,
            NORM_FIRST=norm_before_gate and weight is not None, HAS_SLOTS=state_slots is not None, KEEP=keep,
            num_warps=4 if block <= 4096 else 8, **early_launch(x.device),
        )  # fmt: skip
    return out


@triton.jit
def _norm_part(x, weight, out, i_row, stride_x, eps, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row's columns from ``FIRST`` on."""
    inside = tl.arange(0, BLOCK)
    mask = inside < SIZE
    y = tl.load(x + i_row * stride_x + FIRST + inside, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + FIRST + inside, mask=mask, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps) * scale
    tl.store(out + i_row * SIZE + inside, y.to(out.dtype.element_ty), mask=mask)


@jit
def _split_norm_kernel(
    x, weight, first, second, third, stride_x, eps,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row's part."""
    enter(EARLY)
    i_part, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if i_part == 0:
        _norm_part(x, weight, first, i_row, stride_x, eps, 0, A, BLOCK_A)
    elif i_part == 1:
        _norm_part(x, weight, second, i_row, stride_x, eps, A, B, BLOCK_B)
    else:
        _norm_part(x, weight, third, i_row, stride_x, eps, A + B, C, BLOCK_C)


@launches(split_rms_norm, invariant={})
def split_rms_norm_triton(x, weight, eps, sizes) -> tuple[Tensor, ...]:
    assert x.stride(1) == 1 and weight.is_contiguous() and x.shape[1] == sum(sizes)
    outs = tuple(x.new_empty(x.shape[0], size) for size in sizes)
    if x.shape[0]:
        a, b, c = sizes
        _split_norm_kernel[(3, x.shape[0])](
            x, weight, *outs, x.stride(0), eps,
            A=a, B=b, C=c, BLOCK_A=next_power_of_2(a), BLOCK_B=next_power_of_2(b), BLOCK_C=next_power_of_2(c),
            num_warps=1, **early_launch(x.device),
        )  # fmt: skip
    return outs


@jit
def _mean_square_kernel(x, mean, stride_x, WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
                        EARLY: tl.constexpr):  # fmt: skip
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_x + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(mean + row, tl.sum(values * values, 0) / (WIDTH * RANKS))


@launches(mean_square, invariant={})
def mean_square_triton(x, num_ranks) -> Tensor:
    count, width = x.shape
    assert x.stride(1) == 1
    mean, block = torch.empty(count, 1, dtype=torch.float32, device=x.device), next_power_of_2(width)
    _mean_square_kernel[(count,)](
        x, mean, x.stride(0), WIDTH=width, RANKS=num_ranks, BLOCK=block, num_warps=max(1, min(8, block // 256)),
        **early_launch(x.device),
    )  # fmt: skip
    return mean


@jit
def _scale_by_mean_square_kernel(
    x, mean, weight, gate, out, eps, stride_x, stride_gate,
    WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` columns of one row."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    y = (values * tl.rsqrt(tl.load(mean + row) + eps) * scale).to(out.dtype.element_ty)
    if GATED:
        factor = sigmoid(tl.load(gate + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32))
        y = (y.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + columns, y, mask=mask)


@launches(scale_by_mean_square, invariant={})
def scale_by_mean_square_triton(x, mean, weight, eps, *, zero_centered, gate) -> Tensor:
    count, width = x.shape
    other = x if gate is None else gate
    assert x.stride(1) == other.stride(1) == 1 and other.shape == x.shape and mean.is_contiguous()
    out, block = x.new_empty(count, width), min(1024, next_power_of_2(width))
    _scale_by_mean_square_kernel[(count, cdiv(width, block))](
        x, mean, weight, other, out, eps, x.stride(0), other.stride(0),
        WIDTH=width, ZERO_CENTERED=zero_centered, GATED=gate is not None, BLOCK=block, num_warps=4,
        **early_launch(x.device),
    )  # fmt: skip
    return out
