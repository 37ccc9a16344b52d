"""Layer norm (arXiv 1607.06450) with the residual addition before it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel


@with_kernel("weft.ops.triton.layer_norm")
def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float, *, backend: Backend
) -> tuple[Tensor, Tensor]:
    """``x + y``, rounded to their dtype, and its layer norm, computed in float32.

    Args:
        x, y: ``[N, size]``, contiguous, of one dtype.
        weight, bias: ``[size]``.

    Returns:
        Both ``[N, size]``.
    """
    total = x + y
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)
