"""The vision tower of Inkling: every patch by itself, without attention.

Job: turn neighbouring cells of a patch into one, layer by layer. Owns: module names, which are the published ones. Does
not know: files, requests, where embeddings are kept.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.vision import InklingFold, VisionConfig
from weft.layers.context import ModelContext
from weft.layers.norm import RMSNorm
from weft.layers.vision import VisionLinear
from weft.models.vision_tower import Tower

_NORM_EPS = 1e-6
"""Added to mean squares. transformers reads no key for it."""


class InklingVisionTower(Tower):
    """Matrices over cells that grow from a pixel to the patch, with RMSNorm and GELU between them."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        assert config.inkling is not None
        self._folds = config.inkling.folds
        self.layers = nn.ModuleDict()
        for i, fold in enumerate(self._folds):
            self.layers[f"linear_{i}"] = VisionLinear(fold.in_features, fold.out_channels, context, bias=False)
            if i < len(self._folds) - 1:
                self.layers[f"norm_{i}"] = _norm(fold.out_channels, context)
        self.final_norm = _norm(config.out_hidden_size, context)

    def forward(self, patches: Tensor, places: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        frames, side = self.config.temporal_patch_size, self.config.patch_size
        x = patches.to(self.dtype).view(-1, frames, side, side, self.config.in_channels)
        for i, fold in enumerate(self._folds):
            x = self.layers[f"linear_{i}"](_folded(x, fold))
            if f"norm_{i}" in self.layers:
                x = F.gelu(self.layers[f"norm_{i}"](x.flatten(0, -2)).view_as(x))
        embeddings: Tensor = self.final_norm(x.flatten(0, -2))
        return embeddings[:, None]


def _folded(x: Tensor, fold: InklingFold) -> Tensor:
    """``[N, T, H, W, C] -> [N, T / frames, H / side, W / side, in_features]``."""
    if fold.frames == fold.side == 1:
        return x
    cells = x.unflatten(3, (-1, fold.side)).unflatten(2, (-1, fold.side)).unflatten(1, (-1, fold.frames))
    return cells.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4)


def _norm(size: int, context: ModelContext) -> RMSNorm:
    return RMSNorm(size, _NORM_EPS, context, zero_centered=False)
