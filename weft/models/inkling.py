"""A decoder whose embeddings have a norm, and whose mixers and MLPs end with a short convolution (Inkling).

Job: the order of sums, convolutions and norms. Does not know: caches, what a mixer computes.
"""

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.forward_context import LogitsRows, get_forward_context
from weft.layers.context import ModelContext
from weft.layers.norm import output_norm, residual_norm
from weft.layers.residual_conv import OutputConv
from weft.models.decoder import CausalLM, Decoder, DecoderLayer, LayerPlace
from weft.models.vision_language import VisionDecoder, VisionLanguageModel


class ConvolvedLayer(DecoderLayer):
    """Pre-norm. A convolution over tokens follows each half, so the last layer computes all rows too.

    The layer's input is whole on every rank: it comes from a convolution or from the norm of the embeddings.
    """

    partial_output = False
    attn_sconv: OutputConv
    mlp_sconv: OutputConv

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(config, context, place)
        self._mixers = tuple(name for name in self._mixers if not isinstance(getattr(self, name), OutputConv))

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        self.input_layernorm, self.post_attention_layernorm = (
            residual_norm(config, context, partial=False) for _ in range(2)
        )

    def forward(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor]:
        x, residual = self.feed_forward(*self.mix(x, residual))
        return (x, residual) if rows is None else (rows.of(x), rows.of(residual))

    def mix(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor | None]:
        x, residual = super().mix(x, residual, rows)
        return self.attn_sconv(x), residual

    def feed_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = super().feed_forward(x, residual)
        return self.mlp_sconv(x), residual


class InklingDecoder(Decoder):
    """A decoder with a norm after the embeddings."""

    layer_classes = Decoder.layer_classes | {"convolved": ConvolvedLayer}

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.embed_norm = output_norm(config, context)

    def before_layer(
        self, index: int, x: Tensor, residual: Tensor | None, model_input: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return (self.embed_norm(x) if index == 0 else x), residual

    def embedded(self, ids: Tensor) -> Tensor:
        """``[T] -> [T, hidden_size]``, the input of the first layer, whole on every rank."""
        return self.before_layer(0, self.embed_tokens(ids), None, ids)[0]


class InklingVisionDecoder(InklingDecoder, VisionDecoder):
    """``InklingDecoder`` that reads images. Their embeddings have no norm, and are whole on every rank."""

    def before_layer(
        self, index: int, x: Tensor, residual: Tensor | None, model_input: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = super().before_layer(index, x, residual, model_input)
        if index == 0 and get_forward_context().batch.may_have_media:
            rows = model_input - self.embed_tokens.vocab_size
            x = torch.where(rows[:, None] < 0, x, self.embed_tokens.media_rows[rows.clamp(min=0)])
        return x, residual


class InklingModel(CausalLM):
    """A text model whose head may have fewer rows than the embeddings. The ids beyond are never sampled."""

    decoder = InklingDecoder

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self._num_ids = config.unpadded_vocab_size

    def head_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self._whole_logits(hidden_states)
        if self._num_ids is not None:
            logits[:, self._num_ids :] = -torch.inf
        return logits

    def _whole_logits(self, hidden_states: Tensor) -> Tensor:
        return super().head_logits(hidden_states)


class InklingVisionModel(InklingModel, VisionLanguageModel):
    """``InklingModel`` that reads images."""

    decoder = InklingVisionDecoder
