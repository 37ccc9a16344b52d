"""The vision tower of Qwen3-VL and Qwen3.5 (arXiv 2511.21631): patches in, embeddings for the decoder out.

Job: embed patches, add interpolated positions, run the blocks, merge squares of patches. Owns: module names, which are
the published ones. Does not know: files, requests, where embeddings are kept.

A frame is a grid of patches; the processor lays it out square by square, ``merge * merge`` patches each, which become
one embedding. Frames of a video do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isqrt

import torch
from torch import Tensor, nn

from weft.config.vision import VisionConfig
from weft.layers.context import ModelContext
from weft.layers.vision import ACTIVATIONS, PositionGrid, VisionLayerNorm, VisionLinear
from weft.ops.vision_attention import frame_attention, rotate_patches

Grid = tuple[int, int, int]


class VisionAttention(nn.Module):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self._heads, self._backend = config.num_heads, context.backend
        self.qkv = VisionLinear(config.hidden_size, 3 * config.hidden_size, context)
        self.proj = VisionLinear(config.hidden_size, config.hidden_size, context)

    def forward(self, x: Tensor, cos_sin: Tensor, lengths: Sequence[int]) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], 3, self._heads, -1)
        return self.proj(frame_attention(rotate_patches(qkv, cos_sin, backend=self._backend), lengths))


class VisionMlp(nn.Module):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[config.activation]
        self.linear_fc1 = VisionLinear(config.hidden_size, config.intermediate_size, context)
        self.linear_fc2 = VisionLinear(config.intermediate_size, config.hidden_size, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self._activation(self.linear_fc1(x)))


class VisionBlock(nn.Module):
    """Pre-norm block."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self.norm1, self.norm2 = (VisionLayerNorm(config.hidden_size, context) for _ in range(2))
        self.attn = VisionAttention(config, context)
        self.mlp = VisionMlp(config, context)

    def forward(self, x: Tensor, cos_sin: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), cos_sin, lengths)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """``[N, hidden_size] -> [N / merge_unit, out_hidden_size]``; the norm is of patches, or of merged squares."""

    def __init__(self, config: VisionConfig, context: ModelContext, *, norm_merged: bool) -> None:
        super().__init__()
        self._merged, self._norm_merged = config.hidden_size * config.merge_unit, norm_merged
        self.norm = VisionLayerNorm(self._merged if norm_merged else config.hidden_size, context)
        self.linear_fc1 = VisionLinear(self._merged, self._merged, context)
        self.linear_fc2 = VisionLinear(self._merged, config.out_hidden_size, context)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._merged)) if self._norm_merged else self.norm(x).view(-1, self._merged)
        return self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x)))


class PatchEmbedding(nn.Module):
    """``[N, patch_dim] -> [N, hidden_size]``: a convolution whose kernel is its stride, so one product."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = VisionLinear(config.patch_dim, config.hidden_size, context, kernel=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches)
        return out


class VisionTower(nn.Module):
    """Encodes images and videos.

    Attributes:
        config: the geometry.
    """

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self.config, self._device, self._dtype = config, context.device, context.dtype
        self.patch_embed = PatchEmbedding(config, context)
        self.pos_embed = PositionGrid(config.num_position_embeddings, config.hidden_size, context)
        self.blocks = nn.ModuleList(VisionBlock(config, context) for _ in range(config.depth))
        self.merger = PatchMerger(config, context, norm_merged=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, context, norm_merged=True) for _ in config.deepstack_indexes
        )
        quarter = config.hidden_size // config.num_heads // 4
        exponents = torch.arange(quarter, dtype=torch.float32) / quarter
        self._frequencies = (1.0 / config.rope_theta**exponents).to(context.device)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode items together.

        Args:
            patches: ``[N, patch_dim]`` on the tower's device, the items' one after the other.
            grids: of each item, in patches; heights and widths are multiples of ``spatial_merge_size``.

        Returns:
            ``[N / merge_unit, num_features, out_hidden_size]``: each token's embedding, and then its features for the
            decoder's first layers.
        """
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        places = [patch_places(grid, self.config.spatial_merge_size, self._device) for grid in grids]
        x = self.patch_embed(patches.to(self._dtype))
        side = isqrt(self.config.num_position_embeddings)
        corners = (grid_corners(p, g, side) for p, g in zip(places, grids, strict=True))
        x = x + torch.cat([self.pos_embed(*c).to(self._dtype) for c in corners])
        cos_sin = self._rotation(torch.cat(places))
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos_sin, lengths)
            if index in self.config.deepstack_indexes:
                features.append(self.deepstack_merger_list[len(features)](x))
        return torch.stack([self.merger(x), *features], dim=1)

    def _rotation(self, places: Tensor) -> Tensor:
        """``[N, 2]`` rows and columns -> ``[N, head_dim]``: cosines, then sines; a half of each turns by the row."""
        angles = (places[:, :, None] * self._frequencies).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def patch_places(grid: Grid, merge: int, device: torch.device) -> Tensor:
    """Row and column of each patch of an item in the processor's order, ``[t * h * w, 2]`` int64."""
    t, h, w = grid
    numbers = partial(torch.arange, device=device)
    rows = numbers(h).view(h // merge, 1, merge, 1).expand(-1, w // merge, -1, merge)
    columns = numbers(w).view(1, w // merge, 1, merge).expand(h // merge, -1, merge, -1)
    return torch.stack([rows.reshape(-1), columns.reshape(-1)], dim=1).repeat(t, 1)


def grid_corners(places: Tensor, grid: Grid, side: int) -> tuple[Tensor, Tensor]:
    """The four points of the ``side * side`` grid of learned positions around each patch, and their shares: bilinear,
    corner on corner. ``[N, 4]`` int64 and ``[N, 4]`` float32."""
    steps = torch.tensor([max(grid[1] - 1, 1), max(grid[2] - 1, 1)], device=places.device)
    exact = places.float() * (side - 1) / steps
    low = exact.floor()
    shares = torch.stack([1 - (exact - low), exact - low], dim=-1)  # [N, axis, low or high]
    low = low.long()
    points = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1)
    corners = points[:, 0, :, None] * side + points[:, 1, None, :]
    return corners.flatten(1), (shares[:, 0, :, None] * shares[:, 1, None, :]).flatten(1)
