"""Rotary position embedding as a layer: one cos/sin table that every attention layer of a model shares.

Job: build the table once and rotate queries and keys. Owns: the table. Does not know: heads or caches.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.ops.rotary import apply_rotary, rotary_table


class RotaryEmbedding(nn.Module):
    """``(q [T, Hq, D], k [T, Hkv, D], positions [T] int64) -> (q, k)``; positions are below ``max_model_len``."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._backend = context.backend
        self.cos_sin = rotary_table(config.rope, config.max_position_embeddings, context.max_model_len, context.device)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(q, k, positions, self.cos_sin, backend=self._backend)
