"""The gated RMSNorm kernel.

Job: ``gated_rms_norm`` on the GPU. Owns: how many rows a program takes. Does not know: layers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x, gate, weight, out, num_rows, stride_gate, eps,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of ``x [num_rows, V]``; row r's gate is head ``r % H`` of token ``r // H``."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_v = tl.arange(0, BLOCK_V)
    mask = (rows < num_rows)[:, None] & (o_v < V)[None, :]
    inside = rows[:, None] * V + o_v[None, :]
    b_x = tl.load(x + inside, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + (rows // H * stride_gate + rows % H * V)[:, None] + o_v[None, :], mask=mask, other=0.0)
    b_gate = b_gate.to(tl.float32)
    b_weight = tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)
    y = b_x * scale[:, None] * b_weight[None, :] * b_gate * tl.sigmoid(b_gate)
    tl.store(out + inside, y.to(out.dtype.element_ty), mask=mask)


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Triton kernel of ``gated_rms_norm``.

    ``x`` is contiguous. A three-dimensional gate ``[T, HV, V]`` may be a slice of a wider projection (strided tokens).
    """
    assert x.is_contiguous() and x.shape == gate.shape, f"x {tuple(x.shape)}, gate {tuple(gate.shape)}"
    width, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    assert gate.stride(-1) == 1 and (num_heads == 1 or gate.stride(1) == width), f"gate strides {gate.stride()}"
    num_rows = x.numel() // width
    out = x.new_empty(x.shape)
    if num_rows:
        block_v = triton.next_power_of_2(width)
        rows = max(1, _BLOCK_ELEMENTS // block_v)
        _gated_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, gate, weight, out, num_rows, gate.stride(0), eps,
            H=num_heads, V=width, ROWS=rows, BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return out
