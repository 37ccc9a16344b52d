"""Elementwise gates: of the MLPs (SwiGLU, arXiv 2002.05202) and of the attention output (arXiv 2505.06708)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.traced import traced_op


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """Torch reference of ``silu_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@traced_op(silu_and_mul_reference, fusible=True)
def silu_and_mul(x: Tensor, *, backend: Backend) -> Tensor:
    """``silu(x[..., :I]) * x[..., I:]``.

    Args:
        x: ``[..., 2 * I]``: the gate projection, then the up projection.

    Returns:
        ``[..., I]`` in x's dtype.
    """
    if backend is Backend.TORCH:
        return silu_and_mul_reference(x)
    from weft.ops.triton.activation import silu_and_mul_triton

    return silu_and_mul_triton(x)


def sigmoid_mul_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Torch reference of ``sigmoid_mul``."""
    return x * torch.sigmoid(gate)


def sigmoid_mul(x: Tensor, gate: Tensor, *, backend: Backend) -> Tensor:
    """``x * sigmoid(gate)``.

    Args:
        x, gate: ``[..., N]``, same dtype and shape; rows may be strided (a slice of a wider projection).

    Returns:
        ``[..., N]`` in x's dtype, contiguous.
    """
    if backend is Backend.TORCH:
        return sigmoid_mul_reference(x, gate)
    from weft.ops.triton.activation import sigmoid_mul_triton

    return sigmoid_mul_triton(x, gate)
