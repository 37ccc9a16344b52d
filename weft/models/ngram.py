"""A decoder with embeddings of n-grams before some of its layers (Qwen4-Exp), without and with images.

Job: give these layers the token ids. Does not know: hashes, caches.
"""

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.forward_context import get_forward_context
from weft.layers.context import ModelContext
from weft.layers.ngram import NGramEmbedding
from weft.models.decoder import CausalLM, Decoder, StreamsLayer
from weft.models.vision_language import VisionDecoder, VisionLanguageModel


class NGramDecoder(Decoder):
    """A decoder in which the streams get the embeddings of n-grams before the layers that have some."""

    def before_layer(
        self, index: int, x: Tensor, residual: Tensor | None, input_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layers[index]
        ngrams = getattr(layer, "ple", None)
        if not isinstance(ngrams, NGramEmbedding):
            return x, residual
        assert isinstance(layer, StreamsLayer)
        streams = layer.begin(x) if residual is None else residual
        return x, streams + ngrams(streams, self.hashed_ids(input_ids))

    def hashed_ids(self, input_ids: Tensor) -> Tensor:
        """The ids of which n-grams are hashed, ``[T]`` int64."""
        return input_ids


class NGramVisionDecoder(NGramDecoder, VisionDecoder):
    """``NGramDecoder`` that reads images. N-grams hash the placeholder of an image's token."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self._placeholders = torch.zeros(context.num_media_rows, dtype=torch.int64, device=context.device)

    def place_media(self, rows: Tensor, embeddings: Tensor, token_ids: Tensor) -> None:
        super().place_media(rows, embeddings, token_ids)
        self._placeholders.index_copy_(0, rows, token_ids)

    def hashed_ids(self, input_ids: Tensor) -> Tensor:
        if not get_forward_context().batch.may_have_media:
            return input_ids
        rows = input_ids - self.embed_tokens.vocab_size
        return torch.where(rows < 0, input_ids, self._placeholders[rows.clamp(min=0)])


class NGramModel(CausalLM):
    """A text model with embeddings of n-grams."""

    decoder = NGramDecoder


class NGramVisionModel(VisionLanguageModel):
    """A model with embeddings of n-grams that reads images."""

    decoder = NGramVisionDecoder
