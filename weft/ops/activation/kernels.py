"""``silu_and_mul``, ``sigmoid_mul`` and ``silu`` on the GPU: float32 inside, one rounding."""

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.activation import sigmoid_mul, silu, silu_and_mul
from weft.ops.backend import launches
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK = 1024


@jit
def _gate_kernel(
    x, gate, out, stride_x, stride_gate, limit,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """``out = x * sigmoid(gate)``, times ``gate`` as well for SiLU. Both are clamped if there is a limit."""
    enter(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32)
    if limit is not None:
        g = tl.minimum(g, limit)
        values = tl.minimum(tl.maximum(values, -limit), limit)
    values = values / (1.0 + tl.exp(-g))
    if SILU:
        values = values * g
    tl.store(out + row * WIDTH + columns, values.to(out.dtype.element_ty), mask=mask)


def _gate(x: Tensor, gate: Tensor, silu: bool, limit: float | None = None) -> Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, gate = x.flatten(0, -2), gate.flatten(0, -2)
    assert x.stride(1) == gate.stride(1) == 1
    block = min(_BLOCK, next_power_of_2(width))
    _gate_kernel[(cdiv(width, block), x.shape[0])](
        x, gate, out, x.stride(0), gate.stride(0), limit, WIDTH=width, SILU=silu, BLOCK=block, num_warps=4,
        **early_launch(x.device),
    )  # fmt: skip
    return out


@launches(silu_and_mul, invariant={})
def silu_and_mul_triton(x, *, limit) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _gate(up, gate, silu=True, limit=limit)


@launches(sigmoid_mul, invariant={})
def sigmoid_mul_triton(x, gate) -> Tensor:
    return _gate(x, gate, silu=False)


@launches(silu, invariant={})
def silu_triton(x) -> Tensor:
    return _gate(x, x, silu=False)
