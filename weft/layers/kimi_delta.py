"""Kimi Delta Attention, the recurrent token mixer of Kimi-Linear (arXiv 2510.26692).

Job: one merged input projection, two low-rank gates, short convolution, the gated delta rule with a decay per channel
(one step for decoding rows, chunks for the rest), gated norm, output projection. Owns: the layer's weights, sharded by
head, and the order of the merged projection, ``q | k | v | b | f | g``, the last two of low rank and whole on every
rank. Does not know: how states are allocated or forked; it finds them by its own name in the forward context.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.config.kimi import KimiDeltaConfig
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import Batch, LayerCache, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.decodes_first import mix_rows
from weft.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.layers.norm import GatedRMSNorm
from weft.layers.weight import Layout, RowMap, RowRun, WeightModule, WeightPiece, empty_parameter
from weft.ops.causal_conv1d import causal_conv1d
from weft.ops.gated_delta_rule import chunk_gated_delta_rule
from weft.ops.kda import kda_decode, kda_gates
from weft.ops.padding import clear_padding
from weft.parallel.tensor_parallel import TensorParallel


def one_rank(geometry: KimiDeltaConfig, tp: TensorParallel) -> KimiDeltaConfig:
    """One rank's geometry: heads are split."""
    return replace(geometry, num_heads=divide(geometry.num_heads, tp.size, "linear_attn_config.num_heads"))


class KimiDeltaProjection(ColumnParallelLinear):
    """``[T, hidden_size] -> [T, q | k | v | b | f | g]``."""

    def __init__(self, hidden_size: int, geometry: KimiDeltaConfig, context: ModelContext) -> None:
        local, rank, low = one_rank(geometry, context.tp), context.tp.rank, geometry.head_dim
        parts, target = {}, 0
        for index, (rows, total) in enumerate(
            [(local.width, geometry.width)] * 3 + [(local.num_heads, geometry.num_heads)] + [(low, low)] * 2
        ):
            first = rank * rows if rows != total else 0
            parts[f"{index}."] = RowMap(total, (RowRun(first, target, rows),))
            target += rows
        self._build(hidden_size, target, parts, False, context)


class KimiShortConvolution(WeightModule):
    """Weight of the depthwise causal convolution, ``[3 * width / tp, kernel]``; in files three tensors, or one."""

    def __init__(self, geometry: KimiDeltaConfig, context: ModelContext) -> None:
        super().__init__()
        local, rank, total = one_rank(geometry, context.tp).width, context.tp.rank, geometry.width
        self._split = {f"{i}.": RowMap(total, (RowRun(rank * local, i * local, local),)) for i in range(3)}
        runs = tuple(RowRun(i * total + rank * local, i * local, local) for i in range(3))
        self._merged = {"": RowMap(3 * total, runs)}
        self.weight = empty_parameter(3 * local, geometry.conv_kernel, dtype=context.dtype, device=context.device)

    def layouts(self) -> tuple[Layout, ...]:
        pieces = (
            {f"{part}weight": rows.piece(self.weight, middle=(1,)) for part, rows in parts.items()}
            for parts in (self._split, self._merged)
        )
        return tuple(pieces)


class KimiDelta(WeightModule):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``; padding rows are zero.

    Args:
        name: key of the layer's states and of its entry in the layer table, for example ``model.layers.0.self_attn``.
    """

    def __init__(self, geometry: KimiDeltaConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._backend, self._tp = name, context.backend, context.tp
        self._eps, self._whole = config.rms_norm_eps, geometry
        self.local = local = one_rank(geometry, context.tp)
        self.in_proj = KimiDeltaProjection(config.hidden_size, geometry, context)
        what = "linear_attn_config.num_heads"
        self.f_b_proj, self.g_b_proj = (
            ColumnParallelLinear(geometry.head_dim, geometry.width, bias=False, context=context, what=what)
            for _ in range(2)
        )
        self.conv1d = KimiShortConvolution(geometry, context)
        # The decay is an exponential of an exponential: both its parameters stay in float32 whatever the model's dtype.
        self.A_log = empty_parameter(local.num_heads, dtype=torch.float32, device=context.device)
        self.dt_bias = empty_parameter(local.width, dtype=torch.float32, device=context.device)
        self.norm = GatedRMSNorm(geometry.head_dim, self._eps, context, activation="sigmoid")
        self.out_proj = RowParallelLinear(geometry.width, config.hidden_size, bias=False, context=context, what=what)
        context.layers.register(name, self)

    def forward(self, hidden_states: Tensor) -> Tensor:
        projected, low = self.in_proj(hidden_states), self.local.head_dim
        forget = self.f_b_proj(projected[:, -2 * low : -low])
        gate = self.g_b_proj(projected[:, -low:])
        return self.out_proj(self.mix(projected, forget, gate))

    @split_op("kimi_delta", width=lambda layer: layer.local.width)
    def mix(self, projected: Tensor, forget: Tensor, gate: Tensor) -> Tensor:
        """Everything between the projections: ``[T, q | k | v | b | ...]`` and two ``[T, width] -> [T, width]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        return mix_rows(
            [projected, forget, gate],
            batch,
            [self.local.width],
            lambda x, forget, gate, *, slots, out: self._decode(x, forget, gate, cache, slots, out),
            lambda x, forget, gate: self._prefill(x, forget, gate, batch, cache),
        )

    def _decode(
        self,
        projected: Tensor,
        forget: Tensor,
        gate: Tensor,
        cache: LayerCache,
        slots: Tensor,
        out: Tensor | None,
    ) -> Tensor:
        """Rows that bring one token to an existing state, up to the output projection; see ``kda_decode``."""
        weights = (self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self._eps)
        states = (cache["conv"], cache["recurrent"], slots)
        return kda_decode(projected, forget, gate, *weights, *states, self.local, backend=self._backend, out=out)

    def _prefill(self, projected: Tensor, forget: Tensor, gate: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Rows from ``num_decodes`` on, in chunks, up to the output projection; the other rows are zero."""
        heads, dim, backend = self.local.num_heads, self.local.head_dim, self._backend
        qkv, b = projected.split([3 * self.local.width, projected.shape[1] - 3 * self.local.width], dim=-1)
        g, beta = kda_gates(forget, b[:, :heads], self.A_log, self.dt_bias, backend=backend)
        weight = self.conv1d.weight
        qkv = causal_conv1d(qkv, weight, None, cache["conv"], batch, chunk_size=CHUNK_SIZE, backend=backend)
        q, k, v = qkv.unflatten(-1, (3, heads, dim)).unbind(1)
        mixed = chunk_gated_delta_rule(q, k, v, g, beta, cache["recurrent"], batch, backend=backend)
        normed = self.norm(mixed, gate.unflatten(-1, (heads, dim))).flatten(1)
        return clear_padding(normed, batch.num_tokens)

    def layouts(self) -> tuple[Layout, ...]:
        heads, width = self.local.num_heads, self.local.width
        first = self._tp.rank * heads
        every = slice(None)
        decay = WeightPiece(
            (1, 1, self._whole.num_heads, 1),
            (((every, every, slice(first, first + heads)), self.A_log.view(1, 1, heads, 1)),),
        )
        bias = RowMap(self._whole.width, (RowRun(self._tp.rank * width, 0, width),))
        return ({"A_log": decay, "dt_bias": bias.piece(self.dt_bias)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        """Random decays as in training: A in [1, 16], time steps in [0.001, 0.1] (through softplus, near its log)."""
        return (0.0, math.log(16.0)) if name == "A_log" else (math.log(1e-3), math.log(1e-1))
