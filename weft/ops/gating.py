"""The sigmoid gate on the attention output (Qwen3-Next, Qwen3.5; arXiv 2505.06708).

Job: ``x * sigmoid(gate)``. Owns: nothing. Does not know: where the gate comes from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import Backend


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
