"""The kernel of ``add_media_features``."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2


@jit(do_not_specialize=["first_id"])
def _add_kernel(
    x, ids, features, out, first_id,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one token."""
    enter(EARLY)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    row = tl.load(ids + token) - first_id
    value = tl.load(x + token * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    has_features = inside & (row >= 0)
    value += tl.load(features + row * HIDDEN + columns, mask=has_features, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, value.to(out.dtype.element_ty), mask=inside)


def add_media_features_triton(x: Tensor, ids: Tensor, features: Tensor, first_id: int) -> Tensor:
    """As ``weft.ops.media_features.add_media_features``."""
    num_tokens, hidden_size = x.shape
    assert x.is_contiguous() and features.is_contiguous()
    out = torch.empty_like(x)
    block = min(1024, next_power_of_2(hidden_size))
    _add_kernel[(cdiv(hidden_size, block), num_tokens)](
        x, ids, features, out, first_id, HIDDEN=hidden_size, BLOCK=block, num_warps=4, **early_launch(x.device),
    )  # fmt: skip
    return out
