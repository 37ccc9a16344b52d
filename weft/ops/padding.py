"""Padding rows of a batch: rows of decodes without a state slot, and rows behind the last token."""

import torch
from torch import Tensor


def settle_padding(y: Tensor, state_slots: Tensor, out: Tensor | None) -> Tensor:
    """``y [N, ...]`` with zeros where ``state_slots [N]`` is 0; or written to ``out``, whose rows stay there as they
    are."""
    padding = (state_slots == 0).view(-1, *[1] * (y.dim() - 1))
    return y.masked_fill_(padding, 0.0) if out is None else out.copy_(torch.where(padding, out, y))


def clear_padding(x: Tensor, num_tokens: int) -> Tensor:
    """``x [T, ...]`` with zeros from row ``num_tokens`` on, in place: what a layer computed of them may be NaN, since
    the gates of such rows are arbitrary."""
    if num_tokens < x.shape[0]:
        x[num_tokens:] = 0.0
    return x
