"""Rotary position embedding: one cos/sin table that every attention layer of a model shares."""

from __future__ import annotations

from torch import nn

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.ops.rotary import rotary_table


class RotaryEmbedding(nn.Module):
    """Holds ``cos_sin [max_model_len, rotary_dim]`` float32."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.cos_sin = rotary_table(config.rope, config.max_position_embeddings, context.max_model_len, context.device)
