"""Copies between places of the caches, with torch's operations and with the kernel."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.forward_context import KVCache, StateCache
from weft.ops.backend import Backend
from weft.runner.moves import CacheMover


def caches() -> list[KVCache | StateCache]:
    gen = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(9, *shape, generator=gen).to(DEVICE)

    return [
        KVCache(random(4, 2, 8), random(4, 2, 8)),
        StateCache(random(6, 3), random(2, 4, 5).bfloat16()),
        StateCache(random(6, 3), random(2, 4, 5).bfloat16()),
        KVCache(random(4, 2, 8), random(4, 2, 8)),
    ]


def tensors(all_caches: list[KVCache | StateCache], kind: type) -> list[torch.Tensor]:
    found = [c for c in all_caches if isinstance(c, kind)]
    return [t for c in found for t in ((c.k, c.v) if isinstance(c, KVCache) else (c.conv, c.recurrent))]


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(
    "orders", [[], [(0, 0)], [(3, 5)], [(1, 2), (1, 3), (7, 8)], [(1, 2), (2, 3)], [(4, 6), (6, 4)]]
)
def test_everything_is_read_before_anything_is_written(backend: Backend, orders: list[tuple[int, int]]) -> None:
    ours = caches()
    mover = CacheMover(ours, backend, torch.device(DEVICE))
    for kind, move in ((KVCache, mover.copy_pages), (StateCache, mover.fork_states)):
        before = [t.clone() for t in tensors(ours, kind)]
        others = [t.clone() for t in tensors(ours, KVCache if kind is StateCache else StateCache)]
        move(orders)
        for old, new in zip(before, tensors(ours, kind), strict=True):
            expected = old.clone()
            for source, target in orders:
                expected[target] = old[source]
            assert torch.equal(new, expected)
        for old, new in zip(others, tensors(ours, KVCache if kind is StateCache else StateCache), strict=True):
            assert torch.equal(new, old)
