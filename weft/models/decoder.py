"""The decoder that all supported families share: embedding, layers, final norm, head.

Job: assemble layers as a ``ModelConfig`` says and keep the residual stream fused with the norms. Owns: module names,
which are the published tensors' names up to merging. Does not know: caches, batches, graphs, files. A family's own file
holds what differs: its weight-name table and how it stores the Gated DeltaNet projection.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from weft.layers.gated_delta_net import GatedDeltaNet, InProjLayout
from weft.layers.mlp import MLP
from weft.layers.moe import SparseMoe
from weft.layers.norm import ResidualRMSNorm
from weft.layers.rotary import RotaryEmbedding
from weft.layers.weight import LoadableModel

ATTENTION_PARTS: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
MLP_PARTS: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}


class DecoderLayer(nn.Module):
    """Pre-norm block: token mixer, then MLP or experts. Subclasses bring the mixer.

    ``(x, residual) -> (x, residual)``: the layer's input is the sum of both, which the next norm forms.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, index: int) -> None:
        super().__init__()
        eps, centred = config.rms_norm_eps, config.zero_centered_norm
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, eps, context, zero_centered=centred)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, eps, context, zero_centered=centred)
        self.mlp: nn.Module
        if config.moe is not None and index in config.moe.sparse_layers:
            self.mlp = SparseMoe(config, context)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, context, bias=config.mlp_bias)

    @abstractmethod
    def mix(self, hidden_states: Tensor) -> Tensor:
        """The token mixer: ``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.mix(x), residual)
        return self.mlp(x), residual


class AttentionDecoderLayer(DecoderLayer):
    """A block whose mixer is full attention."""

    def __init__(self, config: ModelConfig, context: ModelContext, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__(config, context, index)
        self.self_attn = Attention(config, context, f"model.layers.{index}.self_attn", rotary)

    def mix(self, hidden_states: Tensor) -> Tensor:
        return self.self_attn(hidden_states)


class LinearDecoderLayer(DecoderLayer):
    """A block whose mixer is Gated DeltaNet."""

    def __init__(self, config: ModelConfig, context: ModelContext, index: int, layout: InProjLayout) -> None:
        super().__init__(config, context, index)
        self.linear_attn = GatedDeltaNet(config, context, f"model.layers.{index}.linear_attn", layout)

    def mix(self, hidden_states: Tensor) -> Tensor:
        return self.linear_attn(hidden_states)


class Decoder(nn.Module):
    """``input_ids [T] int64 -> hidden_states [T, hidden_size]`` after the final norm."""

    def __init__(self, config: ModelConfig, context: ModelContext, layout: InProjLayout) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        rotary = RotaryEmbedding(config, context)
        self.layers = nn.ModuleList(
            AttentionDecoderLayer(config, context, i, rotary)
            if kind == "full_attention"
            else LinearDecoderLayer(config, context, i, layout)
            for i, kind in enumerate(config.layer_types)
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

    Class attributes of a family: ``weight_table`` and ``in_proj_layout``.
    """

    in_proj_layout: ClassVar[InProjLayout] = InProjLayout.GROUPED

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.model = Decoder(config, context, self.in_proj_layout)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context, tied)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[T] int64 -> [T, hidden_size]``; rows of padding tokens are meaningless."""
        return self.model(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """``[N, hidden_size] -> [N, vocab_size]`` in the model's dtype."""
        return self.lm_head(hidden_states)
