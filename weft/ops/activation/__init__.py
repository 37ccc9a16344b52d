"""Elementwise gates: of the MLPs (SwiGLU, arXiv 2002.05202) and of the attention output (arXiv 2505.06708)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import by_row, whole
from weft.ops.traced import traced_op


@traced_op(fusible=True)
@with_kernel("weft.ops.activation.kernels", by_row("x"))
def silu_and_mul(x: Tensor, *, limit: float | None = None, backend: Backend) -> Tensor:
    """``silu(x[..., :I]) * x[..., I:]``.

    Args:
        x: ``[..., 2 * I]``: the gate projection, then the up projection.
        limit: the gate is clamped to at most ``limit``, and the other factor to at most its magnitude.

    Returns:
        ``[..., I]`` in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate).mul_(up)


@with_kernel("weft.ops.activation.kernels", by_row("x", "gate"))
def sigmoid_mul(x: Tensor, gate: Tensor, *, backend: Backend) -> Tensor:
    """``x * sigmoid(gate)``.

    Args:
        x, gate: ``[..., N]``, same dtype and shape; rows may be strided (a slice of a wider projection).

    Returns:
        ``[..., N]`` in x's dtype, contiguous.
    """
    return x * torch.sigmoid(gate)


@with_kernel("weft.ops.activation.kernels", by_row("x"))
def silu(x: Tensor, *, backend: Backend) -> Tensor:
    """``x * sigmoid(x)``, rounded once.

    Args:
        x: ``[..., N]``; rows may be strided (a slice of a wider projection, of which torch's kernel is slow).

    Returns:
        ``[..., N]`` in x's dtype, contiguous.
    """
    return F.silu(x)


def gelu_mul(gate: Tensor, x: Tensor, *, tanh: bool = True, backend: Backend) -> Tensor:
    """``gelu(gate) * x``. Rows are independent on a GPU anyhow.

    Args:
        gate, x: ``[T, N]``; rows may be strided.
        tanh: whether GELU has the form with a hyperbolic tangent, or the exact one.
    """
    rows = by_row("gate", "x") if backend is Backend.INVARIANT_TORCH else whole
    return rows(_gelu_mul, gate, x, approximate="tanh" if tanh else "none")


def gelu(x: Tensor, *, backend: Backend) -> Tensor:
    """The exact GELU of ``x [T, N]``. Rows are independent on a GPU anyhow."""
    return (by_row("x") if backend is Backend.INVARIANT_TORCH else whole)(_gelu, x)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gate_heads(x: Tensor, gate: Tensor, *, backend: Backend) -> Tensor:
    """``x * sigmoid(gate)`` with a gate for each head. Rows are independent on a GPU anyhow.

    Args:
        x: ``[T, H, N]``.
        gate: ``[T, H]``.
    """
    rows = by_row("x", "gate") if backend is Backend.INVARIANT_TORCH else whole
    return rows(_gate_heads, x, gate)


def _gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()[..., None]


def _gelu_mul(gate: Tensor, x: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * x
