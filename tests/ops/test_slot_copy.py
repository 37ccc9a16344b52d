"""Copying slots in many tensors at once."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.slot_copy import SlotCopier

pytest.importorskip("triton")


@pytest.mark.parametrize("backend", list(Backend))
def test_copies_every_tensor_and_nothing_else(backend: Backend) -> None:
    """Slot sizes of 4-byte, 2-byte and 1-byte granularity, larger and smaller than a block; a padding pair."""
    shapes = [((7, 2, 40, 60), torch.float32), ((7, 2, 40, 60), torch.float32), ((7, 9, 3), torch.bfloat16)]
    caches = [torch.randn(shape, device=DEVICE).to(dtype) for shape, dtype in shapes]
    caches.append(torch.randint(0, 100, (7, 5), dtype=torch.uint8, device=DEVICE))
    expected = [cache.clone() for cache in caches]
    pairs = {1: 4, 6: 2, 0: 0}
    for cache in expected:
        for source, target in pairs.items():
            cache[target] = cache[source]
    src, dst = (torch.tensor(list(x), dtype=torch.int32, device=DEVICE) for x in (pairs, pairs.values()))
    SlotCopier(caches, backend=backend).copy(src, dst)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)
