"""Adding features of images to the residual stream of the decoder's first layers (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.traced import traced_op


def add_media_features_reference(x: Tensor, ids: Tensor, features: Tensor, first_id: int) -> Tensor:
    """Torch reference of ``add_media_features``."""
    row = ids - first_id
    added = x + features.index_select(0, row.clamp(min=0))
    return torch.where((row >= 0)[:, None], added, x)


@traced_op(add_media_features_reference)
def media_features_kernel(x: Tensor, ids: Tensor, features: Tensor, first_id: int) -> Tensor:
    """``add_media_features`` by one kernel, which reads features only for the tokens that have some."""
    from weft.ops.triton.media_features import add_media_features_triton

    return add_media_features_triton(x, ids, features, first_id)


def add_media_features(x: Tensor, ids: Tensor, features: Tensor, first_id: int, *, backend: Backend) -> Tensor:
    """``x[t] + features[ids[t] - first_id]`` where ``ids[t] >= first_id``, else ``x[t]``: ``[T, hidden_size]``.

    Args:
        x: ``[T, hidden_size]``, contiguous.
        ids: ``[T]`` int64.
        features: ``[rows, hidden_size]`` in x's dtype; may hold anything in rows that no id names.
        first_id: the id of row 0.
    """
    if backend is Backend.TORCH:
        return add_media_features_reference(x, ids, features, first_id)
    return media_features_kernel(x, ids, features, first_id)
