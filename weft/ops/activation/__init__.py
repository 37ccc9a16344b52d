"""Elementwise gates: of the MLPs (SwiGLU, arXiv 2002.05202) and of the attention output (arXiv 2505.06708)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import by_row
from weft.ops.traced import traced_op


@traced_op(fusible=True)
@with_kernel("weft.ops.activation.kernels", by_row("x"))
def silu_and_mul(x: Tensor, *, backend: Backend) -> Tensor:
    """``silu(x[..., :I]) * x[..., I:]``.

    Args:
        x: ``[..., 2 * I]``: the gate projection, then the up projection.

    Returns:
        ``[..., I]`` in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
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
