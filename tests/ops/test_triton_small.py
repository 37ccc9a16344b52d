"""The small kernels (norms, gates, head norms with rotary and KV store, page copies) against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from weft.ops.activation import silu_and_mul
from weft.ops.activation.kernels import sigmoid_mul_triton, silu_and_mul_triton, silu_triton
from weft.ops.attention.pages import PageCopier
from weft.ops.norm.kernels import rms_norm_triton
from weft.ops.rotary import CacheSlots, HeadNorms, QkvHeads, qk_norm_rope
from weft.ops.rotary.kernels import TILES as ROPE_TILES
from weft.ops.rotary.kernels import Tile as RopeTile
from weft.ops.rotary.kernels import qk_norm_rope_triton

ON_GPU = DEVICE == "cuda"
# Half a unit in the last place of the dtype, and float32 arithmetic before it.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
DTYPES = list(TOLERANCE) if ON_GPU else [torch.float32]


def assert_near(actual: Tensor, want: Tensor) -> None:
    """To within rounding of the dtype, element by element (cancellation in float32 apart)."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), want.double(), rtol=tolerance, atol=2 * tolerance**1.0 * 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 100), (7, 1), (3, 5, 64)] + [(130, 2048), (3, 5120)] * ON_GPU)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], zero_centered: bool) -> None:
    x, residual = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    total = x + residual

    def want(values: Tensor) -> Tensor:
        scale = weight.double() + zero_centered
        return torch.nn.functional.rms_norm(values.double(), shape[-1:], scale, 1e-6)

    y = rms_norm_triton(x, weight, 1e-6, zero_centered=zero_centered)
    assert isinstance(y, Tensor)
    assert_near(y, want(x))
    y, out = rms_norm_triton(x, weight, 1e-6, zero_centered=zero_centered, residual=residual)
    assert torch.equal(out, total)
    assert_near(y, want(total))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (65, 100), (2, 3, 6144), (1, 5, 6148)])
def test_gates(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=DEVICE).to(dtype)
    first, second = x.double().chunk(2, dim=-1)
    assert_near(silu_and_mul_triton(x), torch.nn.functional.silu(first) * second)
    clamped = torch.nn.functional.silu(first.clamp(max=0.4)) * second.clamp(-0.4, 0.4)
    assert_near(silu_and_mul_triton(x, limit=0.4), clamped)
    torch.testing.assert_close(silu_and_mul.reference(x.double(), limit=0.4), clamped)
    assert_near(sigmoid_mul_triton(*x.chunk(2, dim=-1)), first * torch.sigmoid(second))
    assert_near(silu_triton(x.chunk(2, dim=-1)[1]), torch.nn.functional.silu(second))


# tokens, query heads, key heads, head dim, rotary dim, gated, norm, zero-centred
RopeCase = tuple[int, int, int, int, int, bool, bool, bool]
ROPE = [
    (3, 4, 2, 16, 16, False, True, False),
    (5, 6, 2, 24, 8, True, True, True),
    (1, 5, 1, 64, 64, False, False, False),
    (2, 16, 2, 256, 64, True, True, True),
    (7, 3, 3, 24, 24, False, True, True),
]


def check_qk_norm_rope(dtype: torch.dtype, case: RopeCase, tile: RopeTile | None) -> None:
    tokens, hq, hkv, dim, rotary_dim, gated, norm, zero_centered = case
    qkv = torch.randn(tokens, (hq * (1 + gated) + 2 * hkv) * dim, device=DEVICE).to(dtype)
    q_norm, k_norm = (torch.randn(dim, device=DEVICE).to(dtype) if norm else None for _ in range(2))
    cos_sin = torch.randn(50, rotary_dim, device=DEVICE)
    positions, slots = torch.randint(0, 50, (tokens,), device=DEVICE), torch.randperm(20, device=DEVICE)[:tokens]
    caches = [torch.full((5, 4, hkv, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    want_caches = [cache.double() for cache in caches]
    heads, norms = QkvHeads(hq, hkv, dim, gated), HeadNorms(q_norm, k_norm, 1e-6, zero_centered)
    q, gate = qk_norm_rope_triton(
        qkv, heads, norms, cos_sin, positions, CacheSlots(caches[0], caches[1], slots), tile=tile
    )
    doubles = [None if t is None else t.double() for t in (q_norm, k_norm)]
    want_norms, want_slots = HeadNorms(*doubles, 1e-6, zero_centered), CacheSlots(want_caches[0], want_caches[1], slots)
    want, want_gate = qk_norm_rope.reference(qkv.double(), heads, want_norms, cos_sin, positions, want_slots)
    scale = want.abs().max()
    assert (q.double() - want).abs().max() < TOLERANCE[dtype] * scale
    assert (caches[0].double() - want_caches[0]).abs().max() < TOLERANCE[dtype] * want_caches[0].abs().max()
    assert torch.equal(caches[1].double(), want_caches[1])
    assert (gate is None) == (want_gate is None) == (not gated)
    if gate is not None and want_gate is not None:
        assert torch.equal(gate.double(), want_gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROPE)
def test_qk_norm_rope(dtype: torch.dtype, case: RopeCase) -> None:
    check_qk_norm_rope(dtype, case, None)


@pytest.mark.parametrize("tile", [*ROPE_TILES.values(), RopeTile(4, 2, 1, None)])
@pytest.mark.parametrize("case", [(9, 5, 3, 24, 8, False, True, False), (9, 6, 2, 128, 128, False, True, True)])
def test_qk_norm_rope_tiles(case: RopeCase, tile: RopeTile) -> None:
    """Tokens and heads that fill no program, and programs with more query heads than key heads."""
    check_qk_norm_rope(torch.float32, case, tile)


def test_page_copier() -> None:
    caches = [torch.randn(6, 4, 2, 520, device=DEVICE).bfloat16() for _ in range(3)]
    want = [cache.clone() for cache in caches]
    for cache in want:
        cache[4], cache[5] = cache[1], cache[2]
    PageCopier(caches)(torch.tensor([1, 2, 0], device=DEVICE), torch.tensor([4, 5, 0], device=DEVICE))
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache, expected)
