"""Residual streams with Sinkhorn mixing (arXiv 2512.24880): what a block reads, and what it leaves.

Job: from products with the streams to the block's input and the weights of its output. Owns: the arithmetic, float32
inside. Does not know: layers, how the products are computed.
"""

import torch
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import by_row
from weft.ops.traced import traced_op


@traced_op(fusible=True)
@with_kernel("weft.ops.streams.kernels", by_row("streams", "products"))
def read_streams(
    streams: Tensor,
    products: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Mix streams into a block's input, and compute the weights for ``write_streams``.

    The products, divided by the root mean square of all streams, times ``scale`` plus ``base``, are three groups. Their
    sigmoids weigh the streams in the input and, doubled, the output in every stream. The last group is a matrix: its
    softmax by rows is scaled to rows and columns that sum to one (Sinkhorn-Knopp).

    Args:
        streams: ``[T, N, H]``.
        products: ``[T, N + N + N * N]`` float32, linear in the streams.
        scale, base: ``[3]`` and ``[N + N + N * N]`` float32.
        norm_eps, eps: added to the mean square, and to the weights and their sums.

    Returns:
        The input ``[T, H]`` in the streams' dtype, and float32 weights ``[T, N + N * N]`` of the output and the mixing.
    """
    count = streams.shape[1]
    inverse = torch.rsqrt(streams.float().square().mean((1, 2)) + norm_eps)[:, None]
    sizes = [count, count, count * count]
    parts = zip((products * inverse).split(sizes, dim=-1), scale, base.split(sizes), strict=True)
    pre, post, matrix = (part * s + b for part, s, b in parts)
    mix = matrix.unflatten(-1, (count, count)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    x = ((pre.sigmoid() + eps)[..., None] * streams).sum(1).to(streams.dtype)
    return x, torch.cat([2.0 * post.sigmoid(), mix.flatten(1)], dim=-1)


@traced_op(fusible=True)
@with_kernel("weft.ops.streams.kernels", by_row("streams", "output", "weights"))
def write_streams(streams: Tensor, output: Tensor, weights: Tensor, *, backend: Backend) -> Tensor:
    """``post[n] * output + sum_m matrix[m, n] * streams[m]`` for each stream n.

    Args:
        streams: ``[T, N, H]``.
        output: ``[T, H]``.
        weights: ``[T, N + N * N]`` from ``read_streams``, rounded to the streams' dtype here.

    Returns:
        ``[T, N, H]`` in the streams' dtype.
    """
    count = streams.shape[1]
    post, matrix = weights.to(streams.dtype).split([count, count * count], dim=-1)
    mixed = torch.matmul(matrix.unflatten(-1, (count, count)).transpose(1, 2), streams)
    return post[..., None] * output[:, None] + mixed
