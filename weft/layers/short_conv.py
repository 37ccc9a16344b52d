"""Double-gated short convolution, the recurrent token mixer of LFM2.

Job: one merged input projection ``b | c | x``, ``c * conv(b * x)``, output projection. Owns: the layer's weights,
sharded by channel. Does not know: how states are allocated or forked; it finds them by its own name in the forward
context.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.config.chunks import CHUNK_SIZE
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.config.short_conv import ShortConvConfig
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.decodes_first import mix_rows
from weft.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.layers.weight import Layout, RowMap, RowRun, WeightModule, empty_parameter
from weft.ops.short_conv import short_conv, short_conv_decode


class ShortConvProjection(ColumnParallelLinear):
    """``[T, hidden_size] -> [T, b | c | x]`` for the rank's channels; the checkpoint has one tensor of three parts."""

    def __init__(self, hidden_size: int, geometry: ShortConvConfig, context: ModelContext) -> None:
        total, rank = geometry.num_channels, context.tp.rank
        local = divide(total, context.tp.size, "hidden_size")
        runs = tuple(RowRun(part * total + rank * local, part * local, local) for part in range(3))
        self._build(hidden_size, 3 * local, {"": RowMap(3 * total, runs)}, geometry.bias, context)


class DepthwiseConv(WeightModule):
    """Weight ``[C, kernel]`` (``[C, 1, kernel]`` in files) and bias ``[C]`` of a depthwise convolution."""

    def __init__(self, geometry: ShortConvConfig, context: ModelContext) -> None:
        super().__init__()
        local = divide(geometry.num_channels, context.tp.size, "hidden_size")
        self._rows = RowMap(geometry.num_channels, (RowRun(context.tp.rank * local, 0, local),))
        self.weight = empty_parameter(local, geometry.kernel, dtype=context.dtype, device=context.device)
        self.bias: nn.Parameter | None = None
        if geometry.bias:
            self.bias = empty_parameter(local, dtype=context.dtype, device=context.device)

    def layouts(self) -> tuple[Layout, ...]:
        layout = {"weight": self._rows.piece(self.weight, middle=(1,))}
        return (layout if self.bias is None else layout | {"bias": self._rows.piece(self.bias)},)


class ShortConv(nn.Module):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum.

    Args:
        name: key of the layer's states and of its entry in the layer table, for example ``model.layers.0.conv``.
    """

    def __init__(self, geometry: ShortConvConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._backend = name, context.backend
        self.num_channels = divide(geometry.num_channels, context.tp.size, "hidden_size")
        self.in_proj = ShortConvProjection(config.hidden_size, geometry, context)
        self.conv = DepthwiseConv(geometry, context)
        self.out_proj = RowParallelLinear(
            geometry.num_channels, config.hidden_size, bias=geometry.bias, context=context, what="hidden_size"
        )
        context.layers.register(name, self)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out_proj(self.mix(self.in_proj(hidden_states)))

    @split_op("short_conv", width=lambda layer: layer.num_channels)
    def mix(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, b | c | x] -> [T, num_channels]``."""
        context = get_forward_context()
        batch, state = context.batch, context.caches[self.name]["conv"]
        weights, backend = (self.conv.weight, self.conv.bias), self._backend
        return mix_rows(
            [projected],
            batch,
            [self.num_channels],
            lambda x, *, slots, out: short_conv_decode(x, *weights, state, slots, backend=backend, out=out),
            lambda x: short_conv(x, *weights, state, batch, chunk_size=CHUNK_SIZE, backend=backend),
        )
