"""Mamba-2, the recurrent token mixer of Granite 4, Nemotron-H, Bamba, Falcon-H1 (arXiv 2405.21060).

Job: one input projection ``z | x | B | C | dt``, short convolution over x, B and C, the recurrence (one step for
decoding rows, chunks for the rest), gated norm by group, output projection. Owns: the layer's weights, sharded by head
and group. Does not know: how states are allocated or forked; it finds them by its own name in the forward context.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate

import torch
from torch import Tensor, nn

from weft.config.chunks import CHUNK_SIZE
from weft.config.mamba2 import Mamba2Config
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import Batch, LayerCache, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.decodes_first import mix_rows
from weft.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.layers.weight import Layout, RowMap, RowRun, WeightModule, empty_parameter
from weft.ops.causal_conv1d import causal_conv1d
from weft.ops.group_norm import gated_group_norm
from weft.ops.linear_attention import chunk_linear_attention
from weft.ops.mamba2 import mamba2_decode, mamba2_gates
from weft.ops.mamba2_parts import Mamba2Weights, split_heads
from weft.ops.padding import clear_padding
from weft.parallel.tensor_parallel import TensorParallel


def one_rank(geometry: Mamba2Config, tp: TensorParallel) -> Mamba2Config:
    """One rank's geometry: heads are split, and so are the groups that serve them."""
    heads = divide(geometry.num_heads, tp.size, "mamba heads")
    return dataclasses.replace(
        geometry, num_heads=heads, num_groups=divide(geometry.num_groups, tp.size, "mamba groups")
    )


def part_rows(sizes: tuple[int, ...], tp: TensorParallel) -> RowMap:
    """Rows of parts that stand one after the other, each of them split over the ranks."""
    sizes = sizes if tp.size > 1 else (sum(sizes),)
    starts = accumulate((0, *sizes))
    runs, target = [], 0
    for start, size in zip(starts, sizes, strict=False):
        local = size // tp.size
        runs.append(RowRun(start + tp.rank * local, target, local))
        target += local
    return RowMap(sum(sizes), tuple(runs))


class Mamba2Projection(ColumnParallelLinear):
    """``[T, hidden_size] -> [T, z | x | B | C | dt]`` for the rank's heads; the checkpoint has one tensor."""

    def __init__(self, hidden_size: int, geometry: Mamba2Config, context: ModelContext) -> None:
        rows = part_rows(geometry.part_sizes, context.tp)
        local = sum(geometry.part_sizes) // context.tp.size
        self._build(hidden_size, local, {"": rows}, geometry.in_bias, context)


class Mamba2Conv(WeightModule):
    """Weight ``[conv_dim / tp, W]`` (``[conv_dim, 1, W]`` in files) and bias of the convolution over x, B and C."""

    def __init__(self, geometry: Mamba2Config, context: ModelContext) -> None:
        super().__init__()
        self._rows = part_rows(geometry.part_sizes[1:4], context.tp)
        local, dtype, device = geometry.conv_dim // context.tp.size, context.dtype, context.device
        self.weight = empty_parameter(local, geometry.conv_kernel, dtype=dtype, device=device)
        self.bias: nn.Parameter | None = None
        if geometry.conv_bias:
            self.bias = empty_parameter(local, dtype=dtype, device=device)

    def layouts(self) -> tuple[Layout, ...]:
        layout = {"weight": self._rows.piece(self.weight, middle=(1,))}
        return (layout if self.bias is None else layout | {"bias": self._rows.piece(self.bias)},)


class ShardedNormWeight(WeightModule):
    """The weight ``[C / tp]`` of a norm over groups of channels, each on one rank."""

    def __init__(self, num_channels: int, context: ModelContext) -> None:
        super().__init__()
        self._rows = part_rows((num_channels,), context.tp)
        self.weight = empty_parameter(num_channels // context.tp.size, dtype=context.dtype, device=context.device)

    def layouts(self) -> tuple[Layout, ...]:
        return ({"weight": self._rows.piece(self.weight)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


class Mamba2(WeightModule):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum.

    Args:
        name: key of the layer's states and of its entry in the layer table, for example ``model.layers.0.mamba``.
    """

    def __init__(self, geometry: Mamba2Config, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._backend, self._tp = name, context.backend, context.tp
        self._eps, self._geometry = config.rms_norm_eps, geometry
        self.local = local = one_rank(geometry, context.tp)
        self.in_proj = Mamba2Projection(config.hidden_size, geometry, context)
        self.conv1d = Mamba2Conv(geometry, context)
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
        context.layers.register(name, self)

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
        return mix_rows(
            [projected],
            batch,
            [self.local.inner_size],
            lambda x, *, slots, out: self._decode(x, cache, slots, out),
            lambda x: self._prefill(x, batch, cache),
        )

    def _weights(self) -> Mamba2Weights:
        norm = None if self.gated_norm is None else self.gated_norm.weight
        a_log, dt_bias, skip = (self.get_parameter(name) for name in ("A_log", "dt_bias", "D"))
        return Mamba2Weights(self.conv1d.weight, self.conv1d.bias, a_log, dt_bias, skip, norm, self._eps)

    def _decode(self, projected: Tensor, cache: LayerCache, slots: Tensor, out: Tensor | None) -> Tensor:
        """Rows that bring one token to an existing state, up to the output projection; rows without a slot are zero, or
        left as they are in a given ``out``."""
        states = cache["conv"], cache["recurrent"]
        return mamba2_decode(projected, self._weights(), *states, slots, self.local, backend=self._backend, out=out)

    def _prefill(self, projected: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Rows from ``num_decodes`` on, in chunks, up to the output projection; the other rows are zero."""
        local, w, backend = self.local, self._weights(), self._backend
        z, xbc, dt = projected.split([local.inner_size, local.conv_dim, local.num_heads], dim=-1)
        g, step = mamba2_gates(dt, w.A_log, w.dt_bias, local.dt_limit, backend=backend)
        xbc = causal_conv1d(
            xbc, w.conv_weight, w.conv_bias, cache["conv"], batch, chunk_size=CHUNK_SIZE, backend=backend
        )
        x, b, c = split_heads(xbc, local)
        y = chunk_linear_attention(c, b, x, g, step, w.D, cache["recurrent"], batch, backend=backend).flatten(1)
        normed = gated_group_norm(
            y, z, w.norm_weight, w.eps, local.num_groups, norm_before_gate=local.norm_before_gate, backend=backend
        )
        return clear_padding(normed, batch.num_tokens)

    def layouts(self) -> tuple[Layout, ...]:
        rows = part_rows((self._geometry.num_heads,), self._tp)
        return ({name: rows.piece(self.get_parameter(name)) for name in ("A_log", "dt_bias", "D")},)

    def initial_range(self, name: str) -> tuple[float, float]:
        """Random decays as in training: A in [1, 16], time steps in [0.001, 0.1] (through softplus, near its log)."""
        ranges = {"A_log": (0.0, math.log(16.0)), "dt_bias": (math.log(1e-3), math.log(1e-1)), "D": (0.9, 1.1)}
        return ranges[name]
