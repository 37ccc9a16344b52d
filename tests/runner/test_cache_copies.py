"""Copies between places of the caches, with torch's operations and with the kernel."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.config.layer_spec import CacheTensor, LayerSpec
from weft.forward_context import LayerCache
from weft.ops.backend import Backend
from weft.runner.cache_copies import CacheCopier


def tensor(name: str, *shape: int, dtype: str = "float32") -> CacheTensor:
    return CacheTensor(name, shape, dtype)


ATTENTION = LayerSpec(paged=(tensor("k", 2, 8), tensor("v", 2, 8)))
LATENT = LayerSpec(paged=(tensor("latent", 24),))
LINEAR = LayerSpec(states=(tensor("conv", 6, 3), tensor("recurrent", 2, 4, 5, dtype="bfloat16")))
SCAN = LayerSpec(states=(tensor("scan", 7, 2),))
SHORT = LayerSpec(states=(tensor("inputs", 6, 3),))
BOTH = LayerSpec(paged=ATTENTION.paged, states=SHORT.states)
LAYERS = {"a": ATTENTION, "b": LINEAR, "c": LINEAR, "d": ATTENTION, "e": LATENT, "f": SCAN, "g": SHORT, "h": BOTH}
PAGE_SIZE = 4


def make_caches() -> dict[str, LayerCache]:
    """Several kinds side by side, of 9 pages and 9 slots."""
    gen = torch.Generator().manual_seed(0)

    def random(t: CacheTensor, *entries: int) -> torch.Tensor:
        return torch.randn(*entries, *t.shape, generator=gen).to(DEVICE, getattr(torch, t.dtype))

    return {
        name: {t.name: random(t, 9, PAGE_SIZE) for t in spec.paged} | {t.name: random(t, 9) for t in spec.states}
        for name, spec in LAYERS.items()
    }


def tensors(caches: dict[str, LayerCache], kind: str) -> list[torch.Tensor]:
    return [caches[name][t.name] for name, spec in LAYERS.items() for t in getattr(spec, kind)]


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
@pytest.mark.parametrize(
    "copies", [[], [(0, 0)], [(3, 5)], [(1, 2), (1, 3), (7, 8)], [(1, 2), (2, 3)], [(4, 6), (6, 4)]]
)
def test_everything_is_read_before_anything_is_written(backend: Backend, copies: list[tuple[int, int]]) -> None:
    ours = make_caches()
    copier = CacheCopier(LAYERS, ours, backend, torch.device(DEVICE))
    for kind, other, name in (("paged", "states", "pages"), ("states", "paged", "states")):
        before = [t.clone() for t in tensors(ours, kind)]
        others = [t.clone() for t in tensors(ours, other)]
        copier.copy(**{name: copies})
        for old, new in zip(before, tensors(ours, kind), strict=True):
            expected = old.clone()
            for source, target in copies:
                expected[target] = old[source]
            assert torch.equal(new, expected)
        for old, new in zip(others, tensors(ours, other), strict=True):
            assert torch.equal(new, old)


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
def test_pages_and_states_of_one_step(backend: Backend) -> None:
    ours = make_caches()
    before = {kind: [t.clone() for t in tensors(ours, kind)] for kind in ("paged", "states")}
    CacheCopier(LAYERS, ours, backend, torch.device(DEVICE)).copy([(3, 5), (4, 6)], [(7, 2)])
    for kind, copies in (("paged", [(3, 5), (4, 6)]), ("states", [(7, 2)])):
        for old, new in zip(before[kind], tensors(ours, kind), strict=True):
            for source, target in copies:
                old[target] = old[source]
            assert torch.equal(new, old)
