"""Root-mean-square normalisation (RMSNorm, arXiv 1910.07467), plain, zero-centred and gated.

Job: the three variants that the supported models use. Owns: the arithmetic, float32 inside with one rounding at the
end, whatever the input dtype. Does not know: layers or weights' names.
"""

from __future__ import annotations

from typing import overload

import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.traced import traced_op


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = ..., residual: None = ..., backend: Backend
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = ..., residual: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]: ...
@traced_op(fusible=True)
@with_kernel("weft.ops.triton.norm")
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    backend: Backend,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Args:
        x: ``[..., H]``, any float dtype; or with ``residual [..., H]`` the partial sums ``[S, ..., H]`` of
            ``linear_parts``, which are added in order and rounded to the residual's dtype first.
        weight: ``[H]``.
        eps: added to the mean square.
        zero_centered: scale by ``1 + weight`` instead (Qwen3-Next).
        residual: ``[..., H]``; if given, ``x + residual`` is normalised.

    Returns:
        ``y`` in x's dtype; with ``residual``, in its dtype, the pair ``(y, x + residual)``. Inputs are not modified.
    """
    if residual is not None:
        if x.dim() > residual.dim():
            x = x.sum(0).to(residual.dtype)
        residual = x + residual
        x = residual
    scale = weight.float()
    if zero_centered:
        scale = scale + 1.0
    y = F.rms_norm(x.float(), (x.shape[-1],), scale, eps).to(x.dtype)
    return y if residual is None else (y, residual)


rms_norm_reference = rms_norm.reference  # type: ignore[attr-defined]  # of overloads mypy knows calls alone


@with_kernel("weft.ops.triton.gated_norm")
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str = "silu", backend: Backend
) -> Tensor:
    """``weight * rms_norm(x) * silu(gate)``: the output norm of Gated DeltaNet (arXiv 2412.06464), or with a sigmoid
    that of Kimi Delta Attention.

    Args:
        x: ``[N, V]`` or ``[T, HV, V]``, one row per token and value head.
        gate: of x's shape; as ``[T, HV, V]`` it may be a slice of a wider projection (strided tokens).
        weight: ``[V]``, never zero-centred.
        activation: of the gate, ``silu`` or ``sigmoid``.

    Returns:
        x's shape and dtype.
    """
    y = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    factor = F.silu(gate.float()) if activation == "silu" else gate.float().sigmoid()
    return y.mul_(factor).to(x.dtype)
