"""Learned positions of patches: a square grid of vectors, stretched over a frame of any size."""

from __future__ import annotations

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.backend import Backend, with_kernel


@with_kernel("weft.ops.triton.vision_positions")
def grid_positions(weight: Tensor, places: Tensor, *, backend: Backend) -> Tensor:
    """Bilinear between the four grid points around each patch, corner of the grid on corner of the frame.

    Args:
        weight: ``[side * side, size]``, contiguous.
        places: ``[N, columns]`` int32, contiguous, whose first four columns are row and column of a patch, and the last
            row and column of its frame.

    Returns:
        ``[N, size]`` in weight's dtype, computed in float32.
    """
    side = isqrt(len(weight))
    exact = places[:, :2].float() * (side - 1) / places[:, 2:4].clamp(min=1)
    low = exact.floor()
    shares = torch.stack([1 - (exact - low), exact - low], dim=-1)  # [N, axis, low or high]
    low = low.long()
    points = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1)
    corners = (points[:, 0, :, None] * side + points[:, 1, None, :]).flatten(1)
    weights = (shares[:, 0, :, None] * shares[:, 1, None, :]).flatten(1)
    return (F.embedding(corners, weight) * weights[:, :, None]).sum(1).to(weight.dtype)
