"""Gated residual streams (Qwen4-Exp): norms, gates of low rank, and what is added to every stream.

Job: the memory-bound parts of a connection, between its matrix products. Owns: the arithmetic, float32 inside the
kernels. Does not know: layers, products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import by_row
from weft.ops.traced import traced_op


@traced_op(fusible=True)
@with_kernel("weft.ops.streams.gated_kernels", by_row("streams"))
def norm_streams(streams: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, backend: Backend) -> Tensor:
    """RMSNorm of each stream.

    Args:
        streams: ``[T, N, H]``. Streams may be one stream repeated without copies.
        weight: ``[N * H]``.
        eps: added to the mean square.
        zero_centered: scale by ``1 + weight`` instead.

    Returns:
        ``[T, N, H]`` in the streams' dtype, contiguous.
    """
    scale = weight.float().view(streams.shape[1:]) + (1.0 if zero_centered else 0.0)
    wide = streams.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(streams.dtype)


@traced_op(fusible=True)
@with_kernel("weft.ops.streams.gated_kernels", by_row("x"))
def silu_of_mean(x: Tensor, width: int, count: int, *, backend: Backend) -> Tensor:
    """``silu(x / count)`` of the first ``width`` columns: ``[T, W] -> [T, width]`` in x's dtype."""
    return F.silu(x[:, :width] / count)


@traced_op(fusible=True)
@with_kernel("weft.ops.streams.gated_kernels", by_row("streams", "gates"))
def mean_of_gated(streams: Tensor, gates: Tensor, *, backend: Backend) -> Tensor:
    """The mean of ``sigmoid(gates) * streams`` over the streams.

    Args:
        streams: ``[T, N, H]``, contiguous.
        gates: ``[T, W]``, of which the first ``N * H`` columns are used.

    Returns:
        ``[T, H]`` in the streams' dtype.
    """
    return (gates[:, : streams[0].numel()].sigmoid().view(streams.shape) * streams).mean(1)


@traced_op(fusible=True)
@with_kernel("weft.ops.streams.gated_kernels", by_row("streams", "output", "logits"))
def add_to_streams(streams: Tensor, output: Tensor, logits: Tensor, *, backend: Backend) -> Tensor:
    """``streams[n] + 2 * sigmoid(logits[n] / N) * output`` for each of the N streams.

    Args:
        streams: ``[T, N, H]``. Streams may be one stream repeated without copies.
        output: ``[T, H]``.
        logits: ``[T, N]``; rows may be strided.

    Returns:
        ``[T, N, H]`` in the streams' dtype, contiguous.
    """
    weights = 2.0 * (logits / streams.shape[1]).sigmoid()
    return torch.addcmul(streams, output[:, None], weights[..., None])
