"""The shared fixtures do what they promise."""

from __future__ import annotations

import torch


def test_uninitialised_buffers_are_nan() -> None:
    like = torch.zeros(3)
    for tensor in (torch.empty(63), torch.empty(2, 3, dtype=torch.bfloat16), torch.empty_like(like), like.new_empty(5)):
        assert tensor.isnan().all()


def test_integer_and_meta_buffers_are_left_alone() -> None:
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
    assert torch.empty(3, device="meta").is_meta
