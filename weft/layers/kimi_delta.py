"""Kimi Delta Attention, the recurrent token mixer of Kimi-Linear (arXiv 2510.26692) and Ling 3.0.

Job: one merged input projection, two gates (of low rank in Kimi-Linear), short convolution, the gated delta rule with a
decay per channel, gated norm, output projection. Decoding rows take one step, the others run in chunks. Owns: the
layer's weights, sharded by head, and the order of the merged projection, ``q | k | v | b | f | g``; gates of low rank
are whole on every rank. Does not know: how states are allocated or forked; it finds them by its own name in the forward
context.
"""

from dataclasses import replace

import torch
from torch import Tensor

from weft.config.kimi import KimiDeltaConfig
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import Batch, LayerCache, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from weft.layers.norm import GatedRMSNorm
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.short_conv import DepthwiseConv
from weft.layers.weight import (
    WeightLayout,
    WeightPiece,
    empty_parameter,
    split_rows,
    stacked,
    whole_rows,
)
from weft.ops.convolution import causal_conv1d
from weft.ops.delta_rule import DeltaWeights, chunk_gated_delta_rule, kda_decode, kda_gates, kda_verify
from weft.ops.padding import clear_padding
from weft.parallel.tensor_parallel import TensorParallel


def one_rank(geometry: KimiDeltaConfig, tp: TensorParallel) -> KimiDeltaConfig:
    """One rank's geometry: heads are split."""
    return replace(geometry, num_heads=divide(geometry.num_heads, tp.size, "linear_attn_config.num_heads"))


class KimiDelta(RecurrentLayer):
    """Kimi Delta Attention; see ``RecurrentLayer``."""

    def __init__(self, geometry: KimiDeltaConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        self._tp = context.tp
        self._eps, self._whole = config.rms_norm_eps, geometry
        self.local = local = one_rank(geometry, context.tp)
        what = "linear_attn_config.num_heads"
        self._channels = split_rows([geometry.width], context.tp, what)
        gates = whole_rows(geometry.head_dim) if geometry.low_rank else self._channels
        three = [self._channels] * 3
        parts = stacked(*three, split_rows([geometry.num_heads], context.tp, what), gates, gates)
        self.in_proj = PackedLinear(config.hidden_size, parts, bias=False, context=context)
        self._gate_columns = gates.count
        if geometry.low_rank:
            self.f_b_proj, self.g_b_proj = (
                ColumnParallelLinear(geometry.head_dim, geometry.width, bias=False, context=context, what=what)
                for _ in range(2)
            )
        one_tensor = {"": split_rows([geometry.width] * 3, context.tp, what)}
        self.conv1d = DepthwiseConv(
            stacked(*three), one_tensor, kernel=geometry.conv_kernel, bias=False, context=context
        )
        # The decay is an exponential of an exponential: both its parameters stay in float32 whatever the model's dtype.
        self.A_log = empty_parameter(local.num_heads, dtype=torch.float32, device=context.device)
        self.dt_bias = empty_parameter(local.width, dtype=torch.float32, device=context.device)
        self.norm = GatedRMSNorm(geometry.head_dim, self._eps, context, activation="sigmoid")
        self.out_proj = RowParallelLinear(geometry.width, config.hidden_size, bias=False, context=context, what=what)

    def forward(self, hidden_states: Tensor) -> Tensor:
        projected, columns = self.in_proj(hidden_states), self._gate_columns
        forget, gate = projected[:, -2 * columns : -columns], projected[:, -columns:]
        if self.local.low_rank:
            forget, gate = self.f_b_proj(forget), self.g_b_proj(gate)
        return self.out_proj(self.mix(projected, forget, gate))

    @split_op("kimi_delta", width=lambda layer: layer.local.width)
    def mix(self, projected: Tensor, forget: Tensor, gate: Tensor) -> Tensor:
        """Everything between the projections: ``[T, q | k | v | b | ...]`` and two ``[T, width] -> [T, width]``."""
        context = get_forward_context()
        batch, cache, local = context.batch, context.caches[self.name], self.local
        weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self._eps)
        states = cache["conv"], cache["recurrent"]
        return mix_rows(
            [projected, forget, gate],
            states,
            batch,
            [local.width],
            lambda x, forget, gate, *, slots, out: kda_decode(
                x, forget, gate, weights, *states, slots, local, backend=self._backend, out=out
            ),
            lambda x, forget, gate: self._prefill(x, forget, gate, batch, cache),
            lambda x, forget, gate, slots, after: kda_verify(
                x, forget, gate, weights, *states, slots, after, local, backend=self._backend
            ),
        )

    def _prefill(self, projected: Tensor, forget: Tensor, gate: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Rows from ``num_decodes`` on, in chunks, up to the output projection; the other rows are zero."""
        heads, dim, backend = self.local.num_heads, self.local.head_dim, self._backend
        qkv, b = projected.split([3 * self.local.width, projected.shape[1] - 3 * self.local.width], dim=-1)
        floor = self.local.gate_floor
        g, beta = kda_gates(forget, b[:, :heads], self.A_log, self.dt_bias, floor=floor, backend=backend)
        weight = self.conv1d.weight
        qkv = causal_conv1d(qkv, weight, None, cache["conv"], batch, backend=backend)
        q, k, v = qkv.unflatten(-1, (3, heads, dim)).unbind(1)
        mixed = chunk_gated_delta_rule(q, k, v, g, beta, cache["recurrent"], batch, backend=backend)
        normed = self.norm(mixed, gate.unflatten(-1, (heads, dim))).flatten(1)
        return clear_padding(normed, batch.num_tokens)

    def layouts(self) -> tuple[WeightLayout, ...]:
        heads, every = self.local.num_heads, slice(None)
        first = self._tp.rank * heads
        dt_bias = self._channels.piece(self.dt_bias)
        if self.local.flat_decay or not self.local.low_rank:
            rows = split_rows([self._whole.num_heads], self._tp, "num_attention_heads")
            return ({"A_log": rows.piece(self.A_log), "dt_bias": dt_bias},)
        decay = WeightPiece(
            (1, 1, self._whole.num_heads, 1),
            (((every, every, slice(first, first + heads)), self.A_log.view(1, 1, heads, 1)),),
        )
        return ({"A_log": decay, "dt_bias": dt_bias},)
