"""RMSNorms over neighbouring parts of a row in one pass: of Mamba's time steps, B and C."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel


@with_kernel("weft.ops.triton.split_norm")
def split_rms_norm(
    x: Tensor, weight: Tensor, eps: float, sizes: tuple[int, int, int], *, backend: Backend
) -> tuple[Tensor, ...]:
    """``x [T, sum(sizes)]`` in three parts ``[T, size]``, each normalised on its own and contiguous.

    Args:
        weight: ``[sum(sizes)]``, of all parts.
        eps: added to each mean square.
    """
    parts = zip(x.float().split(sizes, dim=-1), weight.float().split(sizes), strict=True)
    return tuple(F.rms_norm(part, part.shape[-1:], scale, eps).to(x.dtype) for part, scale in parts)
