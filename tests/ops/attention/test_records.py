"""Records of pages and states: what is gathered from the caches is what is scattered into others."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.ops.attention.records import Records
from weft.ops.backend import Backend


def make_caches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [((7, 4, 2, 3), torch.float32), ((7, 2048, 3), torch.bfloat16), ((7, 12), torch.float8_e4m3fn)]
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape, dtype in shapes]


@pytest.mark.parametrize("backend", list(Backend))
def test_what_is_gathered_is_scattered(backend: Backend) -> None:
    caches, others = make_caches(), [torch.zeros_like(cache) for cache in make_caches()]
    source, target = Records(caches, backend), Records(others, backend)
    wide = torch.zeros(3, source.num_bytes + 16, dtype=torch.uint8, device=DEVICE)
    rows = wide[:, 8 : 8 + source.num_bytes]
    source.gather(torch.tensor([5, 1, 2], device=DEVICE), rows)
    target.scatter(rows, torch.tensor([1, 6, 2], device=DEVICE))
    for cache, other in zip(caches, others, strict=True):
        before, after = cache.view(torch.uint8), other.view(torch.uint8)
        for read, written in ((5, 1), (1, 6), (2, 2)):
            assert torch.equal(before[read], after[written])
        assert not after[[0, 3, 4, 5]].any()
    assert not wide[:, :8].any() and not wide[:, 8 + source.num_bytes :].any()
