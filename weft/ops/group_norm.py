"""The gated RMSNorm by group of Mamba-2 (arXiv 2405.21060): over all channels of the heads that share B and C."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel


@with_kernel("weft.ops.triton.group_norm")
def gated_group_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    num_groups: int,
    *,
    norm_before_gate: bool = False,
    backend: Backend,
) -> Tensor:
    """``weight * rms_norm(x * silu(gate))``, the root mean square over each group of neighbouring channels.

    Args:
        x: ``[N, C]``.
        gate: ``[N, C]``; rows may be strided (a slice of a wider projection).
        weight: ``[C]``; None: no norm, ``x * silu(gate)``.
        num_groups: divides C.
        norm_before_gate: ``weight * rms_norm(x) * silu(gate)`` instead.

    Returns:
        ``[N, C]`` in x's dtype, computed in float32.
    """
    y, factor = x.float(), F.silu(gate.float())
    if weight is None:
        return (y * factor).to(x.dtype)
    if not norm_before_gate:
        y = y * factor
    groups = y.unflatten(-1, (num_groups, -1))
    y = F.rms_norm(groups, groups.shape[-1:], eps=eps).flatten(-2) * weight.float()
    return (y * factor if norm_before_gate else y).to(x.dtype)
