"""Attention of vision towers: every patch sees all patches of its own frame, forwards and backwards.

Job: rotate queries and keys by rows and columns, attend frame by frame. Does not know: towers, images
beyond the lengths of their frames. Where the host knows these, torch's attention runs; a captured graph reads them from
the device (``bounded_attention``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel


@with_kernel("weft.ops.triton.vision_rotary")
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


def frame_attention(qkv: Tensor, lengths: Sequence[int]) -> Tensor:
    """Full attention within consecutive frames, without a mask: memory grows with the patches, not with their square.

    Args:
        qkv: ``[N, 3, heads, D]``, contiguous.
        lengths: patches of each frame; their sum is N. Neighbours of equal length run together.

    Returns:
        ``[N, heads * D]``.
    """
    parts = []
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        frames = qkv[start : start + count * length].unflatten(0, (count, length))
        q, k, v = (frames[:, :, i].transpose(1, 2) for i in range(3))
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1))
        start += count * length
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@with_kernel("weft.ops.triton.vision_attention")
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
