"""Root-mean-square normalisation (RMSNorm, arXiv 1910.07467): plain, zero-centred, gated, by group or part, over ranks.

Job: the variants that the supported models use. Owns: the arithmetic, float32 inside with one rounding at the end,
whatever the input dtype. Does not know: layers or weights' names.
"""

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import by_row
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
@with_kernel("weft.ops.norm.kernels", by_row("x", "residual"))
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


@with_kernel("weft.ops.norm.kernels", by_row("x", "gate"))
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


@with_kernel("weft.ops.norm.kernels", by_row("x", "gate"))
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


@with_kernel("weft.ops.norm.kernels", by_row("x"))
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


@traced_op(fusible=True)
@with_kernel("weft.ops.norm.kernels", by_row("x"))
def mean_square(x: Tensor, num_ranks: int, *, backend: Backend) -> Tensor:
    """The mean square of each row, divided by the number of ranks. Summed over the ranks, this is the mean square of
    rows whose channels are split over them equally.

    Args:
        x: ``[T, C]``, any float dtype; rows may be strided.

    Returns:
        ``[T, 1]`` in float32.
    """
    return x.float().square().mean(-1, keepdim=True) / num_ranks


@traced_op(fusible=True)
@with_kernel("weft.ops.norm.kernels", by_row("x", "mean", "gate"))
def scale_by_mean_square(
    x: Tensor,
    mean: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    gate: Tensor | None = None,
    backend: Backend,
) -> Tensor:
    """``x / sqrt(mean + eps) * weight``, times ``sigmoid(gate)``: an RMSNorm of mean squares that are known.

    Args:
        x: ``[T, C]``, any float dtype; rows may be strided.
        mean: ``[T, 1]`` in float32, contiguous.
        weight: ``[C]``.
        eps: added to the mean square.
        zero_centered: scale by ``1 + weight`` instead.
        gate: ``[T, C]`` in x's dtype; rows may be strided. The norm is rounded to x's dtype before the product.

    Returns:
        ``[T, C]`` in x's dtype, contiguous.
    """
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    y = (x.float() * torch.rsqrt(mean + eps) * scale).to(x.dtype)
    return y if gate is None else y * torch.sigmoid(gate)
