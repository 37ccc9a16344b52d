"""``gated_rms_norm`` on the GPU: some rows per program."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2
from weft.ops.triton.tile_table import choose_tile


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


def gated_rms_norm_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str = "silu", tile: Tile | None = None
) -> Tensor:
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
