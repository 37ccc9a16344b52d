"""The decoder that all supported families share: embedding, layers, final norm, head.

Job: assemble layers as a ``ModelConfig`` says and keep the residual stream fused with the norms. Owns: module names,
which are the published tensors' names up to merging. Does not know: caches, batches, graphs, files. A family's own file
holds what differs: its weight-name table, and builders for kinds of token mixers that others do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from weft.config.attention import AttentionConfig
from weft.config.model import ModelConfig, layer_name
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from weft.layers.mlp import MLP
from weft.layers.moe import SparseMoe
from weft.layers.norm import ResidualRMSNorm
from weft.layers.weight import LoadableModel

ATTENTION_PARTS: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
MLP_PARTS: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}


MixerBuilder = Callable[[Any, ModelConfig, ModelContext, str], nn.Module]
"""``(geometry, config, context, name)`` to a token mixer, which registers itself in the layer table under ``name``:
``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum."""

Mixers = dict[type, MixerBuilder]
"""From the class of a geometry to what builds such a token mixer."""


class DecoderLayer(nn.Module):
    """Pre-norm block: token mixers (several add up), then MLP or experts.

    ``(x, residual) -> (x, residual)``: the layer's input is the sum of both, which the next norm forms.

    Attributes:
        kind: layers of one kind differ in their weights only.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, index: int, mixers: Mixers) -> None:
        super().__init__()
        eps, centred = config.rms_norm_eps, config.zero_centered_norm
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, eps, context, zero_centered=centred)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, eps, context, zero_centered=centred)
        geometries = config.mixers[config.layer_types[index]]
        self._mixers = tuple(geometries)
        for module, geometry in geometries.items():
            self.add_module(module, mixers[type(geometry)](geometry, config, context, layer_name(index, module)))
        sparse = config.moe is not None and index in config.moe.sparse_layers
        self.mlp: nn.Module
        if sparse:
            self.mlp = SparseMoe(config, context)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, context, bias=config.mlp_bias)
        self.kind = (config.layer_types[index], sparse)

    def mix(self, hidden_states: Tensor) -> Tensor:
        """The token mixers: ``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum."""
        first, *others = self._mixers
        mixed: Tensor = getattr(self, first)(hidden_states)
        for module in others:
            mixed = mixed + getattr(self, module)(hidden_states)
        return mixed

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.mix(x), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """``input_ids [T] int64 -> hidden_states [T, hidden_size]`` after the final norm."""

    def __init__(self, config: ModelConfig, context: ModelContext, mixers: Mixers) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self.layers = nn.ModuleList(
            DecoderLayer(config, context, index, mixers) for index in range(config.num_hidden_layers)
        )
        self.norm = ResidualRMSNorm(
            config.hidden_size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm.add(x, residual)[0]


class CausalLM(LoadableModel):
    """A decoder with a language-model head. Everything about the batch comes from the forward context.

    Class attributes of a family: ``weight_table``, and ``mixers`` where it has kinds of token mixers of its own.
    """

    mixers: ClassVar[Mixers] = {AttentionConfig: Attention}

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.model = Decoder(config, context, self.mixers)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context, tied)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[T] int64 -> [T, hidden_size]``; rows of padding tokens are meaningless."""
        return self.model(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """``[N, hidden_size] -> [N, vocab_size]`` in the model's dtype."""
        return self.lm_head(hidden_states)
