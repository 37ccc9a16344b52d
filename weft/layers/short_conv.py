"""Depthwise convolutions of a step's rows, and the double-gated short convolution, LFM2's recurrent token mixer.

Job: one merged input projection ``b | c | x``, ``c * conv(b * x)``, output projection. Owns: the layer's weights,
sharded by channel. Does not know: how states are allocated or forked; it finds them by its own name in the forward
context.
"""

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.config.short_conv import ShortConvConfig
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.weight import RowMap, WeightLayout, WeightModule, empty_parameter, split_rows
from weft.ops.backend import Backend
from weft.ops.convolution import (
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_verify,
    short_conv,
    short_conv_decode,
    short_conv_verify,
)


class DepthwiseConv(WeightModule):
    """Weight ``[C, kernel]`` (``[C, 1, kernel]`` in files) and bias ``[C]`` of a depthwise convolution.

    Args:
        forms: the divisions into tensors that checkpoints may have: the prefix of each -> where its channels go.
    """

    def __init__(self, *forms: dict[str, RowMap], kernel: int, bias: bool, context: ModelContext) -> None:
        super().__init__()
        self._forms, local = forms, sum(rows.count for rows in forms[0].values())
        self.weight = empty_parameter(local, kernel, dtype=context.dtype, device=context.device)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(local, dtype=context.dtype, device=context.device)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return tuple(self._layout(form) for form in self._forms)

    def _layout(self, form: dict[str, RowMap]) -> WeightLayout:
        layout = {f"{part}weight": rows.piece(self.weight, middle=(1,)) for part, rows in form.items()}
        if self.bias is not None:
            layout |= {f"{part}bias": rows.piece(self.bias) for part, rows in form.items()}
        return layout


def convolve_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, silu: bool, backend: Backend
) -> Tensor:
    """Convolve the rows of this step's batch: ``[T, C] -> [T, C]``. ``state [num_slots, C, W - 1]`` advances in place.

    Args:
        weight, bias: ``[C, W]`` and ``[C]``.
        silu: apply SiLU to the result.
    """
    batch, conv = get_forward_context().batch, (weight, bias, state)
    return mix_rows(
        [x],
        [state],
        batch,
        x.shape[1:],
        lambda x, *, slots, out: causal_conv1d_update(x, *conv, slots, silu=silu, backend=backend, out=out),
        lambda x: causal_conv1d(x, *conv, batch, silu=silu, backend=backend),
        lambda x, slots, after: causal_conv1d_verify(x, *conv, slots, after, silu=silu, backend=backend),
    )


class ShortConv(RecurrentLayer):
    """The gated short convolution; see ``RecurrentLayer``."""

    def __init__(self, geometry: ShortConvConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        channels, what = geometry.num_channels, "hidden_size"
        self.num_channels = divide(channels, context.tp.size, what)
        rows = {"": split_rows([channels] * 3, context.tp, what)}
        self.in_proj = PackedLinear(config.hidden_size, rows, bias=geometry.bias, context=context)
        rows = {"": split_rows([channels], context.tp, what)}
        self.conv = DepthwiseConv(rows, kernel=geometry.kernel, bias=geometry.bias, context=context)
        self.out_proj = RowParallelLinear(channels, config.hidden_size, bias=geometry.bias, context=context, what=what)

    @split_op("short_conv", width=lambda layer: layer.num_channels)
    def mix(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, b | c | x] -> [T, num_channels]``."""
        context = get_forward_context()
        batch, state = context.batch, context.caches[self.name]["conv"]
        weights, backend = (self.conv.weight, self.conv.bias), self._backend
        return mix_rows(
            [projected],
            [state],
            batch,
            [self.num_channels],
            lambda x, *, slots, out: short_conv_decode(x, *weights, state, slots, backend=backend, out=out),
            lambda x: short_conv(x, *weights, state, batch, backend=backend),
            lambda x, slots, after: short_conv_verify(x, *weights, state, slots, after, backend=backend),
        )
