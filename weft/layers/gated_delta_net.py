"""Gated DeltaNet, the recurrent token mixer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid (arXiv 2412.06464).

Job: one merged input projection, short convolution, gated delta rule (one step for decoding rows, chunks for the rest),
gated norm, output projection. Owns: the layer's weights, sharded by head, and the order of the merged projection,
``q | k | v | z | b | a``. Does not know: how states are allocated or forked; it finds them by its own name in the
forward context.
"""

from dataclasses import replace

import torch
from torch import Tensor

from weft.config.gated_delta_net import GatedDeltaNetConfig, InProjLayout
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import Batch, LayerCache, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.norm import GatedRMSNorm
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.short_conv import DepthwiseConv
from weft.layers.weight import (
    RowMap,
    RowRun,
    WeightLayout,
    empty_parameter,
    split_rows,
    stacked,
)
from weft.ops.convolution import causal_conv1d
from weft.ops.delta_rule import DeltaWeights, chunk_gated_delta_rule, gdn_decode, gdn_gates, gdn_verify
from weft.ops.padding import clear_padding
from weft.parallel.tensor_parallel import TensorParallel


def one_rank(geometry: GatedDeltaNetConfig, tp: TensorParallel) -> GatedDeltaNetConfig:
    """One rank's geometry: heads are split, a key head stays with the value heads that it serves."""
    return replace(
        geometry,
        num_k_heads=divide(geometry.num_k_heads, tp.size, "linear_num_key_heads"),
        num_v_heads=divide(geometry.num_v_heads, tp.size, "linear_num_value_heads"),
    )


def _projection_parts(whole: GatedDeltaNetConfig, tp: TensorParallel) -> dict[str, RowMap]:
    """Where a checkpoint's tensors go in ``q | k | v | z | b | a``."""

    def split(*sizes: int) -> RowMap:
        return split_rows(sizes, tp, "linear value heads * head_dim")

    key, value, heads = whole.key_dim, whole.value_dim, whole.num_v_heads
    match whole.in_proj:
        case InProjLayout.GROUPED:
            served = heads // whole.num_k_heads
            k_dim, v_dim = whole.head_k_dim, served * whole.head_v_dim
            qkvz = _grouped_rows(whole.num_k_heads, [k_dim, k_dim, v_dim, v_dim], tp)
            return stacked(qkvz, _grouped_rows(whole.num_k_heads, [served, served], tp))
        case InProjLayout.SEPARATE:
            return stacked(split(key, key, value), split(value), split(heads), split(heads))
        case InProjLayout.SINGLE:
            return stacked(*(split(size) for size in (key, key, value, value, heads, heads)))


def _grouped_rows(num_heads: int, widths: list[int], tp: TensorParallel) -> RowMap:
    """Rows of a tensor grouped by key head, with ``widths`` rows of each part in a group; in the matrix each part's
    rows stand together."""
    group, local = sum(widths), divide(num_heads, tp.size, "linear_num_key_heads")
    runs = []
    for head in range(local):
        source, start = (tp.rank * local + head) * group, 0
        for width in widths:
            runs.append(RowRun(source, start + head * width, width))
            source, start = source + width, start + local * width
    return RowMap(num_heads * group, tuple(runs))


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet; see ``RecurrentLayer``."""

    def __init__(self, geometry: GatedDeltaNetConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        self._eps = config.rms_norm_eps if geometry.norm_eps is None else geometry.norm_eps
        self.local = local = one_rank(geometry, context.tp)
        self._head_rows = split_rows([geometry.num_v_heads], context.tp, "linear_num_value_heads")
        parts = _projection_parts(geometry, context.tp)
        self.in_proj = PackedLinear(config.hidden_size, parts, bias=False, context=context)
        self._split_sizes = [local.conv_dim, local.value_dim, local.num_v_heads, local.num_v_heads]
        what, sizes = "linear value heads * head_dim", (geometry.key_dim, geometry.key_dim, geometry.value_dim)
        three_tensors = stacked(*(split_rows([size], context.tp, what) for size in sizes))
        one_tensor = {"": split_rows(sizes, context.tp, what)}
        self.conv1d = DepthwiseConv(one_tensor, three_tensors, kernel=geometry.conv_kernel, bias=False, context=context)
        # The decay is an exponential of an exponential: both its parameters stay in float32 whatever the model's dtype.
        self.A_log = empty_parameter(local.num_v_heads, dtype=torch.float32, device=context.device)
        self.dt_bias = empty_parameter(local.num_v_heads, dtype=torch.float32, device=context.device)
        gate = geometry.gate_activation
        self.norm = GatedRMSNorm(geometry.head_v_dim, self._eps, context, activation=gate)
        self.out_proj = RowParallelLinear(
            geometry.value_dim, config.hidden_size, bias=False, context=context, what=what
        )

    @property
    def output_projection(self) -> RowParallelLinear:
        """Return the linear layer that produces this layer's output."""
        return self.out_proj

    @split_op("gated_delta_net", width=lambda layer: layer.local.value_dim)
    def mix(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, q | k | v | z | b | a] -> [T, value_dim]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        weights, states = self._weights(), (cache["conv"], cache["recurrent"])
        return mix_rows(
            [projected],
            states,
            batch,
            [self.local.value_dim],
            lambda x, *, slots, out: gdn_decode(x, weights, *states, slots, self.local, backend=self._backend, out=out),
            lambda x: self._prefill(x, batch, cache),
            lambda x, slots, after: gdn_verify(x, weights, *states, slots, after, self.local, backend=self._backend),
        )

    def _weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self._eps)

    def _prefill(self, projected: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Rows from ``num_decodes`` on, in chunks, up to the output projection; the other rows are zero."""
        qkv, z, b, a = projected.split(self._split_sizes, dim=-1)
        doubled = self.local.negative_eigenvalues
        g, beta = gdn_gates(a, b, self.A_log, self.dt_bias, negative_eigenvalues=doubled, backend=self._backend)
        weight = self.conv1d.weight
        qkv = causal_conv1d(qkv, weight, None, cache["conv"], batch, backend=self._backend)
        q, k, v = self._heads(qkv)
        mixed = chunk_gated_delta_rule(q, k, v, g, beta, cache["recurrent"], batch, backend=self._backend)
        normed = self.norm(mixed, z.unflatten(-1, mixed.shape[1:])).flatten(1)
        return clear_padding(normed, batch.num_tokens)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[N, conv_dim]`` -> ``q, k [N, HK, K]``, ``v [N, HV, V]``, as views."""
        local = self.local
        q, k, v = qkv.split([local.key_dim, local.key_dim, local.value_dim], dim=-1)
        shape = (local.num_k_heads, local.head_k_dim)
        return q.unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, (local.num_v_heads, local.head_v_dim))

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: self._head_rows.piece(self.get_parameter(name)) for name in ("A_log", "dt_bias")},)
