"""A decoder with embeddings of n-grams before some of its layers (Qwen4-Exp).

Job: give these layers the token ids. Does not know: hashes, caches.
"""

from torch import Tensor

from weft.layers.ngram import NGramEmbedding
from weft.models.decoder import CausalLM, Decoder, StreamsLayer


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
        return x, streams + ngrams(streams, input_ids)


class NGramModel(CausalLM):
    """A text model with embeddings of n-grams."""

    decoder = NGramDecoder
