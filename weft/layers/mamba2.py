"""Mamba-2, the recurrent token mixer of Granite 4, Nemotron-H, Bamba, Falcon-H1, Zamba2 (arXiv 2405.21060).

Job: one input projection ``z | x | B | C | dt``, short convolution over x, B and C, the recurrence (one step for
decoding rows, chunks for the rest), gated norm by group, output projection. Owns: the layer's weights, sharded by head
and group. Does not know: how states are allocated or forked; it finds them by its own name in the forward context.
"""

import dataclasses

import torch
from torch import Tensor

from weft.config.mamba2 import Mamba2Config
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import Batch, LayerCache, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.short_conv import DepthwiseConv
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, split_rows
from weft.ops.convolution import causal_conv1d
from weft.ops.linear_attention import chunk_linear_attention
from weft.ops.mamba import Mamba2Weights, mamba2_decode, mamba2_gates, split_heads
from weft.ops.norm import gated_group_norm
from weft.ops.padding import clear_padding
from weft.parallel.tensor_parallel import TensorParallel


def one_rank(geometry: Mamba2Config, tp: TensorParallel) -> Mamba2Config:
    """One rank's geometry: heads are split, and so are the groups that serve them."""
    heads = divide(geometry.num_heads, tp.size, "mamba heads")
    return dataclasses.replace(
        geometry, num_heads=heads, num_groups=divide(geometry.num_groups, tp.size, "mamba groups")
    )


class ShardedNormWeight(WeightModule):
    """The weight ``[C / tp]`` of a norm over groups of channels, each on one rank."""

    def __init__(self, num_channels: int, context: ModelContext) -> None:
        super().__init__()
        self._rows = split_rows([num_channels], context.tp, "mamba channels")
        self.weight = empty_parameter(self._rows.count, dtype=context.dtype, device=context.device)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": self._rows.piece(self.weight)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


class Mamba2(RecurrentLayer):
    """Mamba-2; see ``RecurrentLayer``."""

    def __init__(self, geometry: Mamba2Config, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        self._eps, self._geometry = geometry.norm_eps or config.rms_norm_eps, geometry
        self.local = local = one_rank(geometry, context.tp)
        self._head_rows = split_rows([geometry.num_heads], context.tp, "mamba heads")
        rows = {"": split_rows(geometry.part_sizes, context.tp, "mamba channels")}
        self.in_proj = PackedLinear(config.hidden_size, rows, bias=geometry.in_bias, context=context)
        rows = {"": split_rows(geometry.part_sizes[1:4], context.tp, "mamba channels")}
        self.conv1d = DepthwiseConv(rows, kernel=geometry.conv_kernel, bias=geometry.conv_bias, context=context)
        # The decay is an exponential of an exponential: its parameters stay in float32 whatever the model's dtype.
        for parameter in ("A_log", "dt_bias", "D"):
            self.register_parameter(
                parameter, empty_parameter(local.num_heads, dtype=torch.float32, device=context.device)
            )
        self.gated_norm = ShardedNormWeight(geometry.inner_size, context) if geometry.norm else None
        self.out_proj = RowParallelLinear(
            geometry.inner_size, config.hidden_size, bias=geometry.out_bias, context=context, what="mamba channels"
        )
        self._multipliers: Tensor | None = None
        if geometry.part_multipliers is not None:
            parts = zip(local.part_sizes, geometry.part_multipliers, strict=True)
            vector = torch.cat([torch.full((size,), multiplier) for size, multiplier in parts])
            self._multipliers = vector.to(context.device, context.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        geometry = self._geometry
        if geometry.in_multiplier != 1.0:
            hidden_states = hidden_states * geometry.in_multiplier
        projected = self.in_proj(hidden_states)
        if self._multipliers is not None:
            projected = projected * self._multipliers
        out = self.out_proj(self.mix(projected))
        return out if geometry.out_multiplier == 1.0 else out * geometry.out_multiplier

    @split_op("mamba2", width=lambda layer: layer.local.inner_size)
    def mix(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, z | x | B | C | dt] -> [T, inner_size]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        weights, states = self._weights(), (cache["conv"], cache["recurrent"])
        return mix_rows(
            [projected],
            states,
            batch,
            [self.local.inner_size],
            lambda x, *, slots, out: mamba2_decode(
                x, weights, *states, slots, self.local, backend=self._backend, out=out
            ),
            lambda x: self._prefill(x, batch, cache),
        )

    def _weights(self) -> Mamba2Weights:
        norm = None if self.gated_norm is None else self.gated_norm.weight
        a_log, dt_bias, skip = (self.get_parameter(name) for name in ("A_log", "dt_bias", "D"))
        return Mamba2Weights(self.conv1d.weight, self.conv1d.bias, a_log, dt_bias, skip, norm, self._eps)

    def _prefill(self, projected: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Rows from ``num_decodes`` on, in chunks, up to the output projection; the other rows are zero."""
        local, w, backend = self.local, self._weights(), self._backend
        z, xbc, dt = projected.split([local.inner_size, local.conv_dim, local.num_heads], dim=-1)
        g, step = mamba2_gates(dt, w.A_log, w.dt_bias, local.dt_limit, backend=backend)
        xbc = causal_conv1d(xbc, w.conv_weight, w.conv_bias, cache["conv"], batch, backend=backend)
        x, b, c = split_heads(xbc, local)
        y = chunk_linear_attention(c, b, x, g, step, w.D, cache["recurrent"], batch, backend=backend).flatten(1)
        normed = gated_group_norm(
            y, z, w.norm_weight, w.eps, local.num_groups, norm_before_gate=local.norm_before_gate, backend=backend
        )
        return clear_padding(normed, batch.num_tokens)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: self._head_rows.piece(self.get_parameter(name)) for name in ("A_log", "dt_bias", "D")},)
