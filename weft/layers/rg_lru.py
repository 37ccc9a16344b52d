"""The recurrent block of Griffin with its Real-Gated Linear Recurrent Unit (arXiv 2402.19427), of RecurrentGemma.

Job: one input projection ``y | x``; a short convolution over x, then the RG-LRU (one step for decoding rows, chunks for
the rest); ``out(rg_lru(x) * gelu(y))``. Owns: the layer's weights, sharded by block of channels. Does not know: how
states are allocated or forked; the forward context has them by the layer's name.
"""

import math

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.config.recurrent_gemma import RgLruConfig
from weft.config.sharding import divide
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.short_conv import DepthwiseConv, convolve_rows
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, split_rows, stacked, uniform_range
from weft.ops.activation import gelu_mul
from weft.ops.linear import head_linear
from weft.ops.rg_lru import rg_lru, rg_lru_step


class RgLruGates(WeightModule):
    """The gates' block-diagonal matrices ``[2, blocks, width, width]`` and biases ``[2, blocks, width]``, input gate
    first, and the decay's parameter ``[channels]``."""

    def __init__(self, geometry: RgLruConfig, context: ModelContext) -> None:
        super().__init__()
        what, width = "blocks of lru_width", geometry.block_width
        blocks = divide(geometry.num_blocks, context.tp.size, what)
        self._blocks = split_rows([geometry.num_blocks], context.tp, what)
        self._channels = split_rows([geometry.num_channels], context.tp, what)
        self._backend, dtype, device = context.backend, context.dtype, context.device
        self.weight = empty_parameter(2, blocks, width, width, dtype=dtype, device=device)
        self.bias = empty_parameter(2, blocks, width, dtype=dtype, device=device)
        self.decay = empty_parameter(blocks * width, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, channels] -> [T, 2, channels]``: both gates before their biases and sigmoids."""
        blocks, width = self.bias.shape[1:]
        inputs = x.unflatten(-1, (blocks, width))  # [T, blocks, width]
        if self._backend.is_invariant:
            products = [head_linear(inputs, weight, backend=self._backend) for weight in self.weight]
            return torch.stack(products, 1).flatten(2)
        gates = x.new_empty(x.shape[0], 2, blocks, width)
        for gate, weight in zip(gates.unbind(1), self.weight, strict=True):
            torch.bmm(inputs.transpose(0, 1), weight, out=gate.transpose(0, 1))
        return gates.flatten(2)

    def layouts(self) -> tuple[WeightLayout, ...]:
        layout = {"recurrent_param": self._channels.piece(self.decay)}
        for i, name in enumerate(("input", "recurrent")):
            layout[f"{name}_gate_weight"] = self._blocks.piece(self.weight[i])
            layout[f"{name}_gate_bias"] = self._blocks.piece(self.bias[i])
        return (layout,)

    def initial_range(self, name: str) -> tuple[float, float]:
        if name == "decay":  # a decay of 0.9 to 0.999 where the recurrent gate is open, as in training
            low, high = (math.log(math.expm1(-math.log(a) / 8)) for a in (0.999, 0.9))
            return low, high
        return uniform_range(self.weight.shape[-1])


class RgLru(RecurrentLayer):
    """The recurrent block; see ``RecurrentLayer``."""

    def __init__(self, geometry: RgLruConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        channels, what = geometry.num_channels, "lru_width"
        rows = split_rows([channels], context.tp, what)
        self.num_channels = rows.count
        self.in_proj = PackedLinear(config.hidden_size, stacked(rows, rows), bias=True, context=context)
        self.conv1d = DepthwiseConv({"": rows}, kernel=geometry.conv_kernel, bias=True, context=context)
        self.rg_lru = RgLruGates(geometry, context)
        self.out_proj = RowParallelLinear(channels, config.hidden_size, bias=True, context=context, what=what)

    def forward(self, hidden_states: Tensor) -> Tensor:
        y, x = self.in_proj(hidden_states).chunk(2, dim=-1)
        return self.out_proj(gelu_mul(y, self.mix(x), backend=self._backend))

    @split_op("rg_lru", width=lambda layer: layer.num_channels)
    def mix(self, x: Tensor) -> Tensor:
        """Convolution and recurrence: ``[T, num_channels] -> [T, num_channels]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        backend, shape = self._backend, [self.num_channels]
        x = convolve_rows(x, self.conv1d.weight, self.conv1d.bias, cache["conv"], silu=False, backend=backend)
        unit = self.rg_lru.bias.flatten(1), self.rg_lru.decay, cache["recurrent"]
        return mix_rows(
            [x, self.rg_lru(x)],
            [cache["recurrent"]],
            batch,
            shape,
            lambda x, gates, *, slots, out: rg_lru_step(x, gates, *unit, slots, backend=backend, out=out),
            lambda x, gates: rg_lru(x, gates, *unit, batch, backend=backend),
        )
