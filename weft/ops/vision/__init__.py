"""Operations of vision towers, and how their features enter the decoder.

Job: learned positions, norms of heads, rotation by rows and columns, attention frame by frame (every patch sees all
patches of its own frame, forwards and backwards), layer norm (arXiv 1607.06450). Does not know: towers, images beyond
the lengths of their frames. Where the host knows these, torch's attention runs; a captured graph reads them from the
device (``bounded_attention``).
"""

from collections.abc import Sequence
from itertools import groupby
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.rows import whole
from weft.ops.traced import traced_op


@with_kernel("weft.ops.vision.kernels")
def rotate_patches(qkv: Tensor, cos_sin: Tensor, *, backend: Backend) -> Tensor:
    """Rotate queries and keys in place (2D rotary embedding: the angles say which frequency turns by row or column).

    Args:
        qkv: ``[N, 3, heads, D]``, contiguous: queries, keys, values.
        cos_sin: ``[N, D]`` float32: ``D / 2`` cosines, then as many sines.

    Returns:
        ``qkv``, computed in float32 and rounded once.
    """
    half = qkv.shape[-1] // 2
    cos, sin = cos_sin[:, None, None, :half], cos_sin[:, None, None, half:]
    first, second = qkv[:, :2].float().split(half, dim=-1)
    qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return qkv


@with_kernel("weft.ops.vision.kernels")
def norm_rotate_patches(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos_sin: Tensor, *, backend: Backend
) -> Tensor:
    """Normalise every query and key head in place (RMSNorm, arXiv 1910.07467), and rotate it as ``rotate_patches``.

    Args:
        qkv, cos_sin: see ``rotate_patches``.
        q_weight, k_weight: ``[D]``.
        eps: added to the mean square.

    Returns:
        ``qkv``, computed in float32 and rounded once.
    """
    half, weights = qkv.shape[-1] // 2, torch.stack([q_weight, k_weight])[:, None].float()
    cos, sin = cos_sin[:, None, None, :half], cos_sin[:, None, None, half:]
    first, second = (F.rms_norm(qkv[:, :2].float(), qkv.shape[-1:], eps=eps) * weights).split(half, dim=-1)
    qkv[:, :2] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return qkv


def frame_attention(qkv: Tensor, lengths: Sequence[int], first_key: int = 0) -> Tensor:
    """Full attention within consecutive frames, without a mask: memory grows with the patches, not with their square.

    Args:
        qkv: ``[N, 3, heads, D]``, contiguous.
        lengths: patches of each frame; their sum is N. Neighbours of equal length run together.
        first_key: number of patches at the start of each frame that none attends to.

    Returns:
        ``[N, heads * D]``.
    """
    parts = []
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        frames = qkv[start : start + count * length].unflatten(0, (count, length))
        q, k, v = (frames[:, skip:, i].transpose(1, 2) for i, skip in enumerate((0, first_key, first_key)))
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1))
        start += count * length
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@with_kernel("weft.ops.vision.kernels")
def bounded_attention(qkv: Tensor, bounds: Tensor, *, backend: Backend) -> Tensor:
    """Full attention of each patch over a range of patches.

    Args:
        qkv: ``[N, 3, heads, D]``, contiguous, all finite.
        bounds: ``[N, 2]`` int32, rows contiguous: the first patch that it sees, and the one behind the last.

    Returns:
        ``[N, heads * D]``; finite but arbitrary for a patch that sees none.
    """
    # With a mask of all pairs.
    keys = torch.arange(len(qkv), device=qkv.device)
    visible = (keys >= bounds[:, :1]) & (keys < bounds[:, 1:])
    q, k, v = (qkv[:, i].transpose(0, 1) for i in range(3))
    scores = (q @ k.transpose(1, 2)).float() * qkv.shape[-1] ** -0.5
    # Finite: a patch that sees none gets the mean of all, which nobody reads.
    weights = scores.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1)
    return (weights.to(v.dtype) @ v).transpose(0, 1).flatten(1)


@with_kernel("weft.ops.vision.kernels")
def grid_positions(weight: Tensor, places: Tensor, *, centred: bool = False, backend: Backend) -> Tensor:
    """Bilinear between the four grid points around each patch, corner of the grid on corner of the frame.

    Args:
        weight: ``[side * side, size]``, contiguous.
        places: ``[N, columns]`` int32, contiguous, whose first four columns are row and column of a patch, and the last
            row and column of its frame.
        centred: grid points and patches are the centres of equal parts of a side, instead of points from corner to
            corner. Patches outside the outermost grid points take their values.

    Returns:
        ``[N, size]`` in weight's dtype, computed in float32.
    """
    side = isqrt(len(weight))
    if centred:
        exact = ((places[:, :2].float() + 0.5) * side / (places[:, 2:4] + 1) - 0.5).clamp(0, side - 1)
    else:
        exact = places[:, :2].float() * (side - 1) / places[:, 2:4].clamp(min=1)
    low = exact.floor()
    shares = torch.stack([1 - (exact - low), exact - low], dim=-1)  # [N, axis, low or high]
    low = low.long()
    points = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1)
    corners = (points[:, 0, :, None] * side + points[:, 1, None, :]).flatten(1)
    weights = (shares[:, 0, :, None] * shares[:, 1, None, :]).flatten(1)
    return (F.embedding(corners, weight) * weights[:, :, None]).sum(1).to(weight.dtype)


@with_kernel("weft.ops.vision.kernels")
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


@traced_op()
@with_kernel("weft.ops.vision.kernels", whole)
def add_media_features(x: Tensor, ids: Tensor, features: Tensor, first_id: int, *, backend: Backend) -> Tensor:
    """``x[t] + features[ids[t] - first_id]`` where ``ids[t] >= first_id``, else ``x[t]``: ``[T, hidden_size]``. ``x``
    is the residual stream of one of the decoder's first layers (DeepStack, arXiv 2406.04334).

    Args:
        x: ``[T, hidden_size]``, contiguous.
        ids: ``[T]`` int64.
        features: ``[rows, hidden_size]`` in x's dtype; may hold anything in rows that no id names.
        first_id: the id of row 0.
    """
    row = ids - first_id
    added = x + features.index_select(0, row.clamp(min=0))
    return torch.where((row >= 0)[:, None], added, x)
