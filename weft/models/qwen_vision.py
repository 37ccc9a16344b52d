"""The vision tower of Qwen3-VL, Qwen3.5 and Qwen4-Exp (arXiv 2511.21631).

Job: add interpolated positions, run the blocks, merge squares of patches. Owns: module names, which are the published
ones. Does not know: files, requests, where embeddings are kept.
"""

import torch
from torch import Tensor, nn

from weft.config.vision import VisionConfig
from weft.layers.context import ModelContext
from weft.layers.vision import PositionGrid, VisionLayerNorm, VisionLinear
from weft.models.vision_tower import Attend, VisionTower
from weft.ops.vision import rotate_patches


class VisionAttention(nn.Module):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext, *, bias: bool = True) -> None:
        super().__init__()
        self._heads, self._backend = config.num_heads, context.backend
        self.qkv = VisionLinear(config.hidden_size, 3 * config.hidden_size, context, bias=bias)
        self.proj = VisionLinear(config.hidden_size, config.hidden_size, context, bias=bias)

    def forward(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], 3, self._heads, -1)
        return self.proj(attend(self.rotate(qkv, cos_sin)))

    def rotate(self, qkv: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotate queries and keys of ``[N, 3, heads, D]`` in place."""
        return rotate_patches(qkv, cos_sin, backend=self._backend)


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


class QwenVisionTower(VisionTower):
    """Blocks with layer norms over learned positions, and features for the decoder's first layers (DeepStack)."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.pos_embed = PositionGrid(config.num_position_embeddings, config.hidden_size, context)
        self.blocks = nn.ModuleList(VisionBlock(config, context) for _ in range(config.depth))
        self.merger = PatchMerger(config, context, norm_merged=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, context, norm_merged=True) for _ in config.deepstack_indexes
        )

    def encode(self, x: Tensor, places: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        y = self.pos_embed(places)
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x, y = block(x, y, cos_sin, attend)
            if index in self.config.deepstack_indexes:
                features.append(self.deepstack_merger_list[len(features)](x, y))
        return torch.stack([self.merger(x, y), *features], dim=1)
