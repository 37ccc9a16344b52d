"""A decoder in which layers read the token embeddings again, through shared blocks (Zamba).

Job: give these layers the embeddings. Does not know: blocks, caches.
"""

from torch import Tensor

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.norm import ResidualSum
from weft.models.decoder import CausalLM, Decoder, SharedBlockLayer


class SharedBlockDecoder(Decoder):
    """A decoder that runs the shared block of a layer before the layer."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self._embeddings = ResidualSum(config.hidden_size, context, partial=True)

    def input_for_layers(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """The embeddings ``[T, hidden_size]``, in memory of their own: a sum over ranks is formed in place."""
        return self._embeddings(x.clone(), None)

    def before_layer(
        self, index: int, x: Tensor, residual: Tensor | None, model_input: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layers[index]
        return layer.run_block(x, residual, model_input) if isinstance(layer, SharedBlockLayer) else (x, residual)


class SharedBlockModel(CausalLM):
    """A text model with shared blocks."""

    decoder = SharedBlockDecoder
