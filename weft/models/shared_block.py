"""A decoder in which layers read the token embeddings again, through shared blocks (Zamba).

Job: give these layers the embeddings. Does not know: blocks, caches.
"""

from torch import Tensor

from weft.config.model import ModelConfig
from weft.forward_context import LogitsRows
from weft.layers.context import ModelContext
from weft.layers.norm import ResidualSum, residual_norm
from weft.layers.shared_block import SharedBlock
from weft.models.decoder import CausalLM, Decoder, DecoderLayer, LayerPlace


class SharedBlockLayer(DecoderLayer):
    """Pre-norm mixers that read the layer's input and the output of a shared block (``layers/shared_block.py``).

    The residual stream gets the mixers' output alone.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(config, context, place)
        [self._block] = (name for name in self._mixers if isinstance(getattr(self, name), SharedBlock))
        self._mixers = tuple(name for name in self._mixers if name != self._block)

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        self._input = ResidualSum(config.hidden_size, context, partial=partial_input)
        self.input_layernorm = residual_norm(config, context, partial=True)

    def run_block(self, x: Tensor, residual: Tensor | None, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output, this rank's part of the sum, and the layer's input."""
        hidden_states = self._input(x, residual)
        return getattr(self, self._block)(hidden_states, embeddings), hidden_states

    def mix(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the mixers' output. ``x`` and ``residual`` are those of ``run_block``."""
        both, _ = self.input_layernorm.add(x, residual)
        return self.mixer_output(both, rows), residual


class SharedBlockDecoder(Decoder):
    """A decoder that runs the shared block of a layer before the layer."""

    layer_classes = Decoder.layer_classes | {"shared_block": SharedBlockLayer}

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
