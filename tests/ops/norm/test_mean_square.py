"""Norms of channels that are split over the ranks: kernels and references against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.norm import mean_square, scale_by_mean_square
from weft.ops.norm.kernels import mean_square_triton, scale_by_mean_square_triton

ON_GPU = DEVICE == "cuda"
# Half a unit in the last place, and float32 arithmetic before it. The interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3 if ON_GPU else 8e-3}
SHAPES = [(0, 64), (1, 1), (7, 100), (3, 1024), (2, 1031), (2, 2050)]


def strided(shape: tuple[int, int], dtype: torch.dtype, others: int = 9) -> Tensor:
    """Columns of a wider projection with ``others`` besides."""
    return torch.randn(shape[0], shape[1] + others, device=DEVICE).to(dtype)[:, 5 : 5 + shape[1]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_mean_squares_of_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = strided(shape, dtype)
    want = x.double().square().mean(-1, keepdim=True) / 3
    for got in (mean_square_triton(x, 3), mean_square.reference(x, 3)):
        assert got.dtype is torch.float32 and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_scaled_by_their_mean_squares(
    dtype: torch.dtype, shape: tuple[int, int], zero_centered: bool, gated: bool
) -> None:
    """Means of the size of eps, which are not those of the rows. With a gate there are up to three roundings."""
    x, weight = strided(shape, dtype), torch.randn(shape[1], device=DEVICE).to(dtype)
    gate = strided(shape, dtype, others=14)
    mean, eps = 0.5 * torch.rand(shape[0], 1, device=DEVICE), 0.3
    want = x.double() / (mean.double() + eps).sqrt() * (weight.double() + zero_centered)
    if gated:
        want *= gate.double().sigmoid()
    arguments = {"zero_centered": zero_centered, "gate": gate if gated else None}
    for run in (scale_by_mean_square_triton, scale_by_mean_square.reference):
        got = run(x, mean, weight, eps, **arguments)
        assert got.dtype is dtype and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=(1 + 2 * gated) * TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * ON_GPU)
def test_a_norm_is_rounded_before_its_gate(dtype: torch.dtype) -> None:
    """Few elements differ by what a sigmoid in float32 differs."""
    x, gate, weight = strided((9, 1031), dtype), strided((9, 1031), dtype), torch.randn(1031, device=DEVICE).to(dtype)
    mean = mean_square_triton(x, 1)
    norm = scale_by_mean_square_triton(x, mean, weight, 1e-5)
    gated = scale_by_mean_square_triton(x, mean, weight, 1e-5, gate=gate)
    want = (norm.double() * gate.double().sigmoid()).to(dtype)
    assert (gated == want).double().mean() > 0.999


@pytest.mark.parametrize("backend", [Backend.INVARIANT_TORCH, Backend.INVARIANT_TRITON])
def test_a_row_has_the_same_bits_for_any_number_of_rows(backend: Backend) -> None:
    x, gate, weight = *(strided((9, 1031), torch.float32) for _ in range(2)), torch.randn(1031, device=DEVICE)
    mean = mean_square(x, 2, backend=backend)
    y = scale_by_mean_square(x, mean, weight, 1e-5, gate=gate, backend=backend)
    for rows in (slice(1), slice(2, 4), slice(1, 9)):
        part = mean_square(x[rows], 2, backend=backend)
        scaled = scale_by_mean_square(x[rows], part, weight, 1e-5, gate=gate[rows], backend=backend)
        assert torch.equal(part, mean[rows]) and torch.equal(scaled, y[rows])


def test_ranks_add_up_to_the_norm_of_whole_rows() -> None:
    """Three ranks with channels of different sizes."""
    x, weight = torch.randn(5, 96, device=DEVICE) * torch.arange(1, 97, device=DEVICE), torch.rand(96, device=DEVICE)
    parts = x.chunk(3, dim=-1)
    mean = torch.stack([mean_square_triton(part, 3) for part in parts]).sum(0)
    scales = weight.chunk(3)
    got = [scale_by_mean_square_triton(p, mean, w, 1e-5) for p, w in zip(parts, scales, strict=True)]
    torch.testing.assert_close(torch.cat(got, -1), torch.nn.functional.rms_norm(x, (96,), weight, 1e-5))
