"""Mamba, the recurrent token mixer of Mamba, Jamba and FalconMamba (arXiv 2312.00752).

Job: one input projection ``x | z``, and a short convolution over x. B, C and the time steps are projected from the
result, and normalised in Jamba and FalconMamba. The selective scan (one step for decoding rows, chunks for the rest)
and the output projection follow. Owns: the layer's weights, sharded by channel; B, C and the time steps need all
channels, so they are summed over the ranks. Does not know: how states are allocated or forked; the forward context has
them by the layer's name.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from weft.config.mamba import MambaConfig
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.short_conv import DepthwiseConv, convolve_rows
from weft.layers.weight import RowMap, WeightLayout, WeightModule, WeightPiece, empty_parameter, split_rows
from weft.ops.mamba import ScanWeights, selective_scan, selective_scan_step
from weft.ops.norm import split_rms_norm


class PartNorms(WeightModule):
    """The norms over dt, B and C, if the architecture has them. Their weights are in one vector, and all one if the
    architecture has norms without weights."""

    def __init__(self, geometry: MambaConfig, context: ModelContext) -> None:
        super().__init__()
        self.sizes = (geometry.dt_rank, geometry.state_size, geometry.state_size)
        self._backend, self._eps, self._learned = context.backend, geometry.norm_eps, bool(geometry.norm_weights)
        self._has_norms = geometry.norm_weights is not None
        if self._learned:
            self.weight: Tensor = empty_parameter(sum(self.sizes), dtype=context.dtype, device=context.device)
        else:
            self.weight = torch.ones(sum(self.sizes), dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[T, dt | B | C] -> dt, B, C``."""
        if not self._has_norms:
            return tuple(part.contiguous() for part in x.split(self.sizes, dim=-1))
        return split_rms_norm(x, self.weight, self._eps, self.sizes, backend=self._backend)

    def layouts(self) -> tuple[WeightLayout, ...]:
        if not self._learned:
            return ({},)
        parts = zip(self.sizes, self.weight.split(self.sizes), strict=True)
        return ({f"{i}.weight": WeightPiece((n,), (((slice(0, n),), part),)) for i, (n, part) in enumerate(parts)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


class SelectiveScanLayer(RecurrentLayer):
    """Convolution, selective scan and output projection; see ``RecurrentLayer``.

    A subclass computes time steps, B and C from the convolution's output.

    Args:
        x_and_z: which rows of the input projection this rank has, for x and then for the gate z.
    """

    def __init__(
        self, geometry: MambaConfig, x_and_z: RowMap, config: ModelConfig, context: ModelContext, name: str
    ) -> None:
        super().__init__(context, name)
        hidden_size, channels, what = config.hidden_size, geometry.num_channels, "mamba channels"
        self.num_channels = divide(channels, context.tp.size, what)
        self._channels = split_rows([channels], context.tp, what)
        self.in_proj = PackedLinear(hidden_size, {"": x_and_z}, bias=geometry.bias, context=context)
        self.conv1d = DepthwiseConv(
            {"": self._channels}, kernel=geometry.conv_kernel, bias=geometry.conv_bias, context=context
        )
        # The decay is an exponential of an exponential: its parameters stay in float32 whatever the model's dtype.
        shape, device = (geometry.state_size, self.num_channels), context.device
        self.A_log = empty_parameter(*shape, dtype=torch.float32, device=device)
        self.D = empty_parameter(self.num_channels, dtype=torch.float32, device=device)
        self.out_proj = RowParallelLinear(channels, hidden_size, bias=geometry.bias, context=context, what=what)

    @property
    @abstractmethod
    def time_bias(self) -> Tensor:
        """The bias ``[num_channels]`` of time steps, which is added in float32."""

    @abstractmethod
    def time_steps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the convolution's output ``[T, num_channels]``: time steps ``[T, num_channels]`` without their bias,
        and B and C as ``selective_scan`` takes them."""

    @split_op("mamba", width=lambda layer: layer.num_channels)
    def mix(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, x | z] -> [T, num_channels]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        backend, shape = self._backend, [self.num_channels]
        x, z = projected.chunk(2, dim=-1)
        x = convolve_rows(x, self.conv1d.weight, self.conv1d.bias, cache["conv"], silu=True, backend=backend)
        scan = ScanWeights(self.time_bias, self.A_log, self.D), cache["recurrent"]
        return mix_rows(
            [x, z, *self.time_steps(x)],
            [cache["recurrent"]],
            batch,
            shape,
            lambda x, z, dt, b, c, *, slots, out: selective_scan_step(
                x, z, dt, b, c, *scan, slots, backend=backend, out=out
            ),
            lambda x, z, dt, b, c: selective_scan(x, z, dt, b, c, *scan, batch, backend=backend),
        )


class Mamba(SelectiveScanLayer):
    """Mamba; see ``RecurrentLayer``."""

    def __init__(self, geometry: MambaConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        channels, what = geometry.num_channels, "mamba channels"
        x_and_z = split_rows([channels] * 2, context.tp, what)
        super().__init__(geometry, x_and_z, config, context, name)
        inner = geometry.dt_rank + 2 * geometry.state_size
        self.x_proj = RowParallelLinear(channels, inner, bias=False, context=context, what=what)
        self._all_reduce = AllReduce.inside_a_layer(inner, context)
        self.part_norms = PartNorms(geometry, context)
        self.dt_proj = ColumnParallelLinear(geometry.dt_rank, channels, bias=True, context=context, what=what)

    @property
    def time_bias(self) -> Tensor:
        bias = self.dt_proj.bias
        assert bias is not None, "dt_proj has a bias"
        return bias

    def time_steps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.x_proj(x)
        if self._all_reduce is not None:
            parts = self._all_reduce(parts)
        dt, b, c = self.part_norms(parts)
        return self.dt_proj.quant_method.apply(self.dt_proj, dt, None), b, c

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"A_log": self._channels.piece(self.A_log.t()), "D": self._channels.piece(self.D)},)
