"""Attention with clipped heads, a position bias, output gates, and a sink for each token and head (Inkling 2).

Job: the projections and clips, the convolutions of keys and values, and attention over pages or over a window. Owns:
the scales of clips. Does not know: how states are allocated or forked.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.config.inkling2 import ClippedAttentionConfig
from weft.config.model import ModelConfig
from weft.config.sharding import head_range
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.attention import PagedAttention
from weft.layers.context import ModelContext
from weft.layers.dynamic_conv import DynamicConv
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.recurrent import mix_rows
from weft.layers.relative_attention import RelativeBias
from weft.layers.residual_conv import ResidualConv
from weft.layers.weight import RowMap, RowRun, WeightLayout, WeightModule, empty_parameter, split_rows, stacked
from weft.ops.activation import sigmoid_mul
from weft.ops.attention import paged_attention, store_kv
from weft.ops.window_attention import ScoreTerms, Windows, window_attention, window_attention_decode


def clip(x: Tensor, threshold: float) -> Tensor:
    """Scale heads ``[..., D]`` in float32 down to an L2 norm of ``threshold``, if it is greater."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (threshold / (norm + 1e-6)).clamp(max=1.0)


class ScaledClip(WeightModule):
    """A learned scale ``[H, D]`` of this rank's heads, then the clip: ``[T, H * D] -> [T, H, D]`` in float32."""

    def __init__(self, heads: RowMap, width: int, threshold: float, context: ModelContext) -> None:
        super().__init__()
        self._heads, self._threshold = heads, threshold
        self.scale = empty_parameter(heads.count, width, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return clip(x.view(-1, *self.scale.shape).float() * self.scale, self._threshold)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"scale": self._heads.piece(self.scale)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


class AttentionRows(NamedTuple):
    """Operands of attention for a step's tokens.

    Attributes:
        q: ``[T, Hq, D]``.
        k, v: ``[T, Hkv, D]``.
        bias: ``[T, Hq, extent]``.
        sinks: ``[T, Hq]``.
        gate: ``[T, Hq * D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    sinks: Tensor
    gate: Tensor


class ClippedAttention(PagedAttention):
    """``[Q, T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum, over all tokens.

    Attributes:
        num_inputs: Q, 1: queries, keys and values are projected from one input.
    """

    num_inputs = 1

    def __init__(self, geometry: ClippedAttentionConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self._geometry, self.name, self._backend = geometry, name, context.backend
        relative, heads, tp = geometry.relative, geometry.relative.attention, context.tp
        self.head_dim, self._scale, self._eps = heads.head_dim, heads.head_dim**-0.5, config.rms_norm_eps
        query_heads, what = split_rows([heads.num_heads], tp, "num_attention_heads"), "num_attention_heads * head_dim"
        kv_heads = head_range(heads.num_kv_heads, tp.rank, tp.size, "num_key_value_heads")
        self.num_heads, self.num_kv_heads = query_heads.count, len(kv_heads)
        self.output_width = self.num_heads * heads.head_dim
        widths = [heads.num_heads * n for n in (heads.head_dim, heads.head_dim, relative.rank, 1)]
        queries = [split_rows([width], tp, what) for width in widths]
        keys, taps = (
            RowMap(heads.num_kv_heads * n, (RowRun(kv_heads.start * n, 0, len(kv_heads) * n),))
            for n in (heads.head_dim, relative.kernel)
        )
        self._add_projections(queries, keys, taps, config.hidden_size, context)
        self._query_sizes, self._key_size = [rows.count for rows in queries], keys.count
        self.o_proj = RowParallelLinear(widths[0], config.hidden_size, bias=False, context=context, what=what)
        self.q_l2_clip = ScaledClip(query_heads, heads.head_dim, geometry.head_clip, context)
        self.rel_l2_clip = ScaledClip(query_heads, relative.rank, geometry.relative_clip, context)
        self.rel_logits_proj = RelativeBias(relative, context)
        context.layers.register(name, self)

    def _add_projections(
        self, queries: list[RowMap], keys: RowMap, taps: RowMap, hidden_size: int, context: ModelContext
    ) -> None:
        """Add the input projections ``q | gate | relative | sinks``, keys and values, and the convolution."""
        kernel = self._geometry.relative.kernel
        self.in_proj = PackedLinear(hidden_size, stacked(*queries, keys, keys), bias=False, context=context)
        self.kv_conv: Any = ResidualConv(stacked(keys, keys), kernel, context, scale=(kernel + 1) ** -0.5)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.o_proj(self.attend(self._project(inputs)))

    def _project(self, inputs: Tensor) -> Tensor:
        """``[Q, T, hidden_size] -> [T, q | gate | relative | sinks | k | v | …]``."""
        return self.in_proj(inputs[0])

    def _convolve(self, projected: Tensor, state: Tensor) -> Tensor:
        """``[T, k | v | …] -> [T, 2, Hkv, D]``."""
        return self.kv_conv.convolve(projected, state.flatten(1, 3)).view(-1, 2, self.num_kv_heads, self.head_dim)

    def attend_rows(self, projected: Tensor) -> Tensor:
        """``[T, q | gate | relative | sinks | k | v | …] -> [T, num_heads * head_dim]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        rows = self._rows(projected, cache["conv"], batch.positions)
        store_kv(rows.k, rows.v, cache["k"], cache["v"], batch.slot_mapping)
        attended = paged_attention(
            rows.q,
            cache["k"],
            cache["v"],
            batch,
            scale=self._scale,
            sinks=rows.sinks,
            bias=rows.bias,
            backend=self._backend,
        )
        return sigmoid_mul(attended.flatten(1), rows.gate, backend=self._backend)

    def _rows(self, projected: Tensor, state: Tensor, positions: Tensor) -> AttentionRows:
        dtype = projected.dtype
        q, gate, relative, sinks = projected[:, : sum(self._query_sizes)].split(self._query_sizes, dim=-1)
        k, v = self._convolve(projected[:, sum(self._query_sizes) :], state).float().unbind(1)
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self._eps)
        queries, near = self.q_l2_clip(q), self.rel_l2_clip(relative) / self._scale  # biases are added before the scale
        if self._geometry.relative.log_floor is not None:
            factor = self._factor(positions)
            queries, near = queries * factor, near * factor
        k = clip(k, self._geometry.head_clip)
        queries, k, v = (x.to(dtype).contiguous() for x in (queries, k, v))
        return AttentionRows(queries, k, v, self.rel_logits_proj(near.to(dtype)), sinks.contiguous(), gate)

    def _factor(self, positions: Tensor) -> Tensor:
        """The factor ``[T, 1, 1]`` of scores, which grows with the position."""
        floor, alpha = self._geometry.relative.log_floor, self._geometry.relative.log_alpha
        assert floor is not None
        return (1.0 + alpha * ((positions + 1).float() / floor).clamp_min(1.0).log())[:, None, None]


class ClippedWindow(ClippedAttention):
    """The same over a sliding window; padding rows are zero."""

    @split_op("clipped_window", width=lambda layer: layer.output_width)
    def attend(self, projected: Tensor) -> Tensor:
        """``[T, q | gate | relative | sinks | k | v] -> [T, num_heads * head_dim]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        q, k, v, bias, sinks, gate = self._rows(projected, cache["conv"], batch.positions)
        windows = Windows(cache["k"], cache["v"])
        options: dict[str, Any] = {"scale": self._scale, "backend": self._backend}
        attended = mix_rows(
            [q, k, v, batch.positions, sinks, bias],
            windows,
            batch,
            q.shape[1:],
            lambda q, k, v, positions, *terms, slots, out: window_attention_decode(
                q, k, v, windows, slots, positions, terms=ScoreTerms(*terms), out=out, **options
            ),
            lambda q, k, v, _, sinks, bias: window_attention(
                q, k, v, *windows, batch, sinks=sinks, bias=bias, **options
            ),
        )
        return sigmoid_mul(attended.flatten(1), gate, backend=self._backend)


class DynamicAttention(ClippedAttention):
    """Attention over all tokens, whose convolutions have taps of each token. Queries, keys and values have inputs of
    their own."""

    num_inputs = 3

    def _add_projections(
        self, queries: list[RowMap], keys: RowMap, taps: RowMap, hidden_size: int, context: ModelContext
    ) -> None:
        self.q_in_proj, self.k_in_proj, self.v_in_proj = (
            PackedLinear(hidden_size, stacked(*parts), bias=False, context=context)
            for parts in (queries, (keys, taps), (keys, taps))
        )
        self.kv_conv = DynamicConv(keys, self._geometry.relative.kernel, context)

    def _project(self, inputs: Tensor) -> Tensor:
        q, k, v = (
            project(x) for project, x in zip((self.q_in_proj, self.k_in_proj, self.v_in_proj), inputs, strict=True)
        )
        return torch.cat([q, k, v], dim=-1)

    def _convolve(self, projected: Tensor, state: Tensor) -> Tensor:
        both = projected.unflatten(1, (2, -1))
        kv, taps = both.split([self._key_size, both.shape[2] - self._key_size], dim=-1)
        kv, taps = (x.unflatten(2, (self.num_kv_heads, -1)) for x in (kv, taps))
        return self.kv_conv(kv, taps, state.flatten(1, 4))


def clipped_attention(
    geometry: ClippedAttentionConfig, config: ModelConfig, context: ModelContext, name: str
) -> ClippedAttention:
    """A layer of the geometry: dynamic, over a window, or over all tokens."""
    if geometry.dynamic:
        return DynamicAttention(geometry, config, context, name)
    return (ClippedAttention if geometry.relative.window is None else ClippedWindow)(geometry, config, context, name)
