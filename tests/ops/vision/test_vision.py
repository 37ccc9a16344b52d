"""Operations of vision towers and of their features, kernels against references."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.vision import (
    add_layer_norm,
    add_media_features,
    bounded_attention,
    frame_attention,
    grid_positions,
    norm_rotate_patches,
    rotate_patches,
)


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (3, 12)])
def test_rotation(heads: int, head_dim: int) -> None:
    qkv = torch.randn(5, 3, heads, head_dim, device=DEVICE)
    angles = torch.randn(5, head_dim // 2, device=DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    turned = torch.view_as_complex(torch.stack(qkv[:, :2].chunk(2, dim=-1), dim=-1).contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)[:, None, None])
    want = torch.cat([turned.movedim(-1, -2).flatten(-2), qkv[:, 2:, :, :].flatten(3)], dim=1)
    for backend in (Backend.TORCH, Backend.TRITON):
        torch.testing.assert_close(rotate_patches(qkv.clone(), cos_sin, backend=backend), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (3, 12)])
def test_rotation_of_normalised_heads(heads: int, head_dim: int) -> None:
    """Each head by itself, queries and keys with weights of their own; values stay."""
    qkv = torch.randn(5, 3, heads, head_dim, device=DEVICE)
    q_weight, k_weight = torch.randn(2, head_dim, device=DEVICE)
    angles = torch.randn(5, head_dim // 2, device=DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    normed = qkv.clone()
    for part, weight in enumerate((q_weight, k_weight)):
        x = qkv[:, part].double()
        normed[:, part] = (x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * weight.double()).float()
    want = rotate_patches(normed, cos_sin, backend=Backend.TORCH)
    for backend in (Backend.TORCH, Backend.TRITON):
        got = norm_rotate_patches(qkv.clone(), q_weight, k_weight, 0.1, cos_sin, backend=backend)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [1, 6, 6, 3]])
def test_frames_do_not_see_each_other(lengths: list[int]) -> None:
    qkv = torch.randn(sum(lengths), 3, 2, 8, dtype=torch.float64)
    frame = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", qkv[:, 0], qkv[:, 1]) * 8**-0.5
    scores = scores.masked_fill(frame[:, None] != frame[None, :], -torch.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), qkv[:, 2]).flatten(1)
    torch.testing.assert_close(frame_attention(qkv, lengths), want)


def test_first_rows_of_frames_that_nobody_sees() -> None:
    qkv = torch.randn(16, 3, 2, 8, dtype=torch.float64)
    want = torch.cat([frame_attention(frame[2:], [len(frame) - 2]) for frame in qkv.split([5, 5, 6])])
    qkv[[0, 1, 5, 6, 10, 11], 1:] = 1e4
    seen = [row for row in range(16) if row not in (0, 1, 5, 6, 10, 11)]
    torch.testing.assert_close(frame_attention(qkv, [5, 5, 6], first_key=2)[seen], want)


@pytest.mark.parametrize(("lengths", "padding", "head_dim"), [([7], 1, 16), ([40, 40, 3], 30, 8), ([70, 70], 52, 12)])
def test_bounds_on_the_device(lengths: list[int], padding: int, head_dim: int) -> None:
    """Results equal those of frames known on the host. Padding sees nothing, stays finite, and no row sees padding."""
    total = sum(lengths)
    qkv = torch.randn(total + padding, 3, 2, head_dim, device=DEVICE)
    qkv[total:] = 1e4
    ends = torch.tensor(lengths).cumsum(0).int()
    bounds = torch.stack([ends - torch.tensor(lengths), ends], dim=1).repeat_interleave(torch.tensor(lengths), dim=0)
    bounds = torch.cat([bounds, torch.full((padding, 2), total)]).int().to(DEVICE)
    want = frame_attention(qkv[:total].double(), lengths).float()
    for backend in (Backend.TORCH, Backend.TRITON):
        got = bounded_attention(qkv, bounds, backend=backend)
        assert got.isfinite().all()
        torch.testing.assert_close(got[:total], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("height", "width", "size"), [(1, 7, 24), (5, 5, 16), (9, 3, 24)])
def test_positions_between_grid_points(height: int, width: int, size: int, centred: bool) -> None:
    grid = torch.randn(25, size, device=DEVICE)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ends = torch.tensor([height - 1, width - 1]).expand(height * width, 2)
    places = torch.cat([torch.stack([rows.flatten(), columns.flatten()], 1), ends, ends], 1).int().to(DEVICE)
    stretched = grid.T.reshape(1, size, 5, 5).double()
    want = torch.nn.functional.interpolate(stretched, (height, width), mode="bilinear", align_corners=not centred)
    for backend in (Backend.TORCH, Backend.TRITON):
        got = grid_positions(grid, places, centred=centred, backend=backend)
        torch.testing.assert_close(got.double(), want[0].flatten(1).T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [24, 64])
def test_sum_and_norm(size: int) -> None:
    x, y = torch.randn(5, size, device=DEVICE), 3 + torch.randn(5, size, device=DEVICE)
    weight, bias = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE)
    want = torch.nn.functional.layer_norm((x + y).double(), (size,), weight.double(), bias.double(), 1e-6)
    for backend in (Backend.TORCH, Backend.TRITON):
        total, normed = add_layer_norm(x, y, weight, bias, 1e-6, backend=backend)
        assert torch.equal(total, x + y)
        torch.testing.assert_close(normed.double(), want, atol=1e-5, rtol=1e-5)


def test_features_are_added_to_the_tokens_that_have_some() -> None:
    x, features = torch.randn(6, 20, device=DEVICE), torch.randn(8, 20, device=DEVICE)
    features[5:] = torch.nan
    ids = torch.tensor([3, 100, 99, 104, 0, 102], device=DEVICE)
    want = x.clone()
    want[[1, 3, 5]] += features[[0, 4, 2]]
    for backend in (Backend.TORCH, Backend.TRITON):
        assert torch.equal(add_media_features(x, ids, features, 100, backend=backend), want)
