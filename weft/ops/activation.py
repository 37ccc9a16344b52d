"""The gated activation of the MLPs (SwiGLU, arXiv 2002.05202).

Job: ``silu(gate) * up`` on a packed input. Owns: nothing. Does not know: linear layers.
"""

from __future__ import annotations

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
