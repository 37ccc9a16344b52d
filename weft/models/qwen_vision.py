"""The vision tower of Qwen3-VL, Qwen3.5 and Qwen4-Exp (arXiv 2511.21631): patches in, embeddings for the decoder out.

Job: embed patches, add interpolated positions, run the blocks, merge squares of patches. Owns: module names, which are
the published ones. Does not know: files, requests, where embeddings are kept.

A frame is a grid of patches. The processor lays it out square by square; the ``merge * merge`` patches of a square
become one embedding. Frames of a video do not attend to each other.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.config.vision import VisionConfig
from weft.layers.context import ModelContext
from weft.layers.vision import PositionGrid, VisionLayerNorm, VisionLinear
from weft.ops.vision import bounded_attention, frame_attention, rotate_patches

Grid = tuple[int, int, int]
Attend = Callable[[Tensor], Tensor]
"""``[N, 3, heads, D] -> [N, heads * D]``: attention of all patches, each within its frame."""

NUM_PLACES = 6
"""Numbers in a row of ``patch_places``."""


class VisionAttention(nn.Module):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self._heads, self._backend = config.num_heads, context.backend
        self.qkv = VisionLinear(config.hidden_size, 3 * config.hidden_size, context)
        self.proj = VisionLinear(config.hidden_size, config.hidden_size, context)

    def forward(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], 3, self._heads, -1)
        return self.proj(attend(rotate_patches(qkv, cos_sin, backend=self._backend)))


class VisionMlp(nn.Module):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self._activation = config.activation
        self.linear_fc1 = VisionLinear(config.hidden_size, config.intermediate_size, context)
        self.linear_fc2 = VisionLinear(config.intermediate_size, config.hidden_size, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.linear_fc1.activated(x, self._activation))


class VisionBlock(nn.Module):
    """Pre-norm block: ``x, y`` to ``x, y``, of which the sum is the residual stream."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self.norm1, self.norm2 = (VisionLayerNorm(config.hidden_size, context) for _ in range(2))
        self.attn = VisionAttention(config, context)
        self.mlp = VisionMlp(config, context)

    def forward(self, x: Tensor, y: Tensor, cos_sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        x, normed = self.norm1.add(x, y)
        x, normed = self.norm2.add(x, self.attn(normed, cos_sin, attend))
        return x, self.mlp(normed)


class PatchMerger(nn.Module):
    """``x, y [N, hidden_size] -> [N / merge_unit, out_hidden_size]``, of their sum; the norm is of patches, or of
    merged squares."""

    def __init__(self, config: VisionConfig, context: ModelContext, *, norm_merged: bool) -> None:
        super().__init__()
        self._merged, self._norm_merged = config.hidden_size * config.merge_unit, norm_merged
        self.norm = VisionLayerNorm(self._merged if norm_merged else config.hidden_size, context)
        self.linear_fc1 = VisionLinear(self._merged, self._merged, context)
        self.linear_fc2 = VisionLinear(self._merged, config.out_hidden_size, context)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self._norm_merged:
            x, y = x.view(-1, self._merged), y.view(-1, self._merged)
        normed = self.norm.add(x, y)[1].view(-1, self._merged)
        return self.linear_fc2(self.linear_fc1.activated(normed, "gelu"))


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
        dtype: of what it computes.
    """

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self.config, self.dtype, self._backend = config, context.dtype, context.backend
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

    def forward(self, patches: Tensor, places: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Encode items together.

        Args:
            patches: ``[N, patch_dim]`` on the tower's device, the items' one after the other.
            places: ``[N, 6]`` int32 on the same device, as ``patch_places`` makes them.
            lengths: ``frame_lengths`` of the items. If None, as in a graph, the lengths are read from ``places`` on
                the device. Padding patches may follow the real ones then: their places are zeros, and the number of
                real patches in the last two columns.

        Returns:
            ``[N / merge_unit, num_features, out_hidden_size]``: each token's embedding, and then its features for the
            decoder's first layers. Arbitrary for padding.
        """
        attend: Attend = partial(bounded_attention, bounds=places[:, 4:], backend=self._backend)
        if lengths is not None:
            attend = partial(frame_attention, lengths=lengths)
        x, y = self.patch_embed(patches.to(self.dtype)), self.pos_embed(places)
        cos_sin = self._rotation(places[:, :2])
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x, y = block(x, y, cos_sin, attend)
            if index in self.config.deepstack_indexes:
                features.append(self.deepstack_merger_list[len(features)](x, y))
        return torch.stack([self.merger(x, y), *features], dim=1)

    def _rotation(self, places: Tensor) -> Tensor:
        """``[N, 2]`` rows and columns -> ``[N, head_dim]``: cosines, then sines; a half of each turns by the row."""
        angles = (places[:, :, None] * self._frequencies).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each frame of some items."""
    return [h * w for t, h, w in grids for _ in range(t)]


def patch_places(grids: Sequence[Grid], merge: int) -> NDArray[np.int32]:
    """Return the places of the items' patches, ``[N, 6]``, in the processor's order.

    The columns are the patch's row and column, the last row and column of its frame, the frame's first patch, and the
    patch after the frame's last.
    """
    places = np.empty((sum(t * h * w for t, h, w in grids), NUM_PLACES), dtype=np.int32)
    first = 0
    for t, h, w in grids:
        frames = places[first : first + t * h * w].reshape(t, h * w, NUM_PLACES)
        frames[:, :, :2] = _rows_and_columns(h, w, merge)
        frames[:, :, 2:4] = h - 1, w - 1
        frames[:, :, 4] = (first + h * w * np.arange(t))[:, None]
        frames[:, :, 5] = frames[:, :, 4] + h * w
        first += t * h * w
    return places


@lru_cache(maxsize=64)
def _rows_and_columns(height: int, width: int, merge: int) -> NDArray[np.int32]:
    """Return row and column of a frame's patches, square by square: ``[height * width, 2]``."""
    squares = np.indices((height, width), dtype=np.int32).reshape(2, height // merge, merge, width // merge, merge)
    return squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
