"""A decoder with a scaled residual stream and routers that pass on a state (ZAYA1).

Job: the order of scales, norms and halves of a layer. Does not know: convolutions, experts, caches.
"""

from torch import Tensor

from weft.config.model import ModelConfig, layer_name
from weft.forward_context import LogitsRows, other_batch
from weft.layers.context import ModelContext
from weft.layers.mlp_router import RouterCarry
from weft.layers.residual_scale import InputScale, ResidualScale, StreamRMSNorm
from weft.models.decoder import CausalLM, Decoder, DecoderLayer, LayerPlace


class ScaledLayer(DecoderLayer):
    """Pre-norm, with a scaled stream: the router's state ``[T, R]`` of the previous layer, and the stream ``[T,
    hidden_size]`` in float32. The first layer ignores the state."""

    partial_output = False

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(config, context, place)
        self.carry: RouterCarry | None = None
        if place.name != layer_name(0):
            assert config.moe is not None and config.moe.router_size is not None
            self.carry = RouterCarry(config.moe.router_size, context)

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        size = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (StreamRMSNorm(config, context) for _ in range(2))  # type: ignore[assignment]
        self.post_attention_residual_scale, self.post_mlp_residual_scale = (
            ResidualScale(size, context) for _ in range(2)
        )

    def forward(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor]:
        assert residual is not None, "the stream begins before the first layer"
        mixed = self.mixer_output(self.input_layernorm(residual), rows)
        if rows is None:
            return self._feed_forward(mixed, x, residual)
        with other_batch(rows.batch):
            return self._feed_forward(mixed, rows.of(x), rows.of(residual))

    def _feed_forward(self, mixed: Tensor, state: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.post_attention_residual_scale(mixed, residual)
        carried = None if self.carry is None else self.carry(state)
        out, state = self.mlp(self.post_attention_layernorm(residual), carried)
        return state, self.post_mlp_residual_scale(out, residual)


class ScaledDecoder(Decoder):
    """A decoder of scaled layers."""

    layer_classes = Decoder.layer_classes | {"scaled": ScaledLayer}

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.input_scale = InputScale(config.hidden_size, context)
        self.norm = StreamRMSNorm(config, context)  # type: ignore[assignment]

    def before_layer(
        self, index: int, x: Tensor, residual: Tensor | None, model_input: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return x, self.input_scale(x) if residual is None else residual


class ZayaModel(CausalLM):
    """A text model with scaled residuals and routers that pass on a state."""

    decoder = ScaledDecoder
