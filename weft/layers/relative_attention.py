"""Attention with a relative position bias, whose keys and values come from short convolutions (Inkling).

Job: attention's projections and norms, the convolutions, the biases, and attention over pages or over a window. Owns:
the matrix from a head's relative vector to the biases of distances, whole on every rank. Does not know: how states are
allocated or forked.
"""

from typing import Any

import torch
from torch import Tensor

from weft.config.inkling import RelativeAttentionConfig
from weft.config.model import ModelConfig
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.linear import ColumnParallelLinear
from weft.layers.recurrent import mix_rows
from weft.layers.residual_conv import ResidualConv
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, stacked, whole
from weft.ops.attention import paged_attention
from weft.ops.backend import Backend
from weft.ops.linear import head_linear
from weft.ops.rows import by_row
from weft.ops.rows import whole as all_rows
from weft.ops.window_attention import ScoreTerms, Windows, window_attention, window_attention_decode


class RelativeBias(WeightModule):
    """``relative [T, num_heads, rank]`` to what is added to the scores of keys by distance, ``[T, num_heads,
    extent]``."""

    def __init__(self, geometry: RelativeAttentionConfig, context: ModelContext) -> None:
        super().__init__()
        self._backend = context.backend
        self.proj = empty_parameter(geometry.rank, geometry.extent, dtype=context.dtype, device=context.device)

    def forward(self, relative: Tensor) -> Tensor:
        if self._backend.is_invariant:
            return head_linear(relative, self.proj.expand(relative.shape[1], -1, -1), backend=self._backend)
        return relative @ self.proj

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"proj": whole(self.proj)},)


class RelativeAttention(Attention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum; padding rows are open.

    Attributes:
        first_row: the position at which the layer's own sequence begins, which counts as its position 0. Inputs before
            it are zeros. Their keys get no weight where they have a bias; further back, their score is 0.
    """

    first_row = 0

    def __init__(
        self, geometry: RelativeAttentionConfig, config: ModelConfig, context: ModelContext, name: str
    ) -> None:
        super().__init__(geometry.attention, config, context, name)
        self._geometry = geometry
        self.r_proj = ColumnParallelLinear(
            config.hidden_size,
            geometry.attention.num_heads * geometry.rank,
            bias=False,
            context=context,
            what="num_attention_heads * d_rel",
        )
        self.rel_logits_proj = RelativeBias(geometry, context)
        keys = self.qkv_proj.head_rows[1]
        self.kv_conv = ResidualConv(stacked(keys, keys), geometry.kernel, context)

    def _project(self, hidden_states: Tensor) -> Tensor:
        """``[T, hidden_size] -> [T, q | k | v | relative]``."""
        return torch.cat([super()._project(hidden_states), self.r_proj(hidden_states)], dim=-1)

    def attend_rows(self, projected: Tensor) -> Tensor:
        """``[T, q | k | v | relative] -> [T, num_heads * head_dim]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        qkv, relative = self._split(projected, cache["conv"])
        q, _ = self._rotate_and_store(qkv)
        if self._geometry.log_floor is not None:
            q, relative = (self._scaled_by_position(x, batch.positions) for x in (q, relative))
        return paged_attention(
            q,
            cache["k"],
            cache["v"],
            batch,
            scale=self._scale,
            bias=self._bias(relative, batch.positions),
            v_scale=self.v_scale if self._scales(cache) else None,
            backend=self._backend,
        ).flatten(1)

    def _split(self, projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``q | k | v`` with convolved keys and values, and the relative vectors ``[T, num_heads, rank]``."""
        queries, *keys_values = self.qkv_proj.split_sizes
        relative = projected.shape[1] - queries - sum(keys_values)
        q, kv, relative_states = projected.split([queries, sum(keys_values), relative], dim=-1)
        convolved = self.kv_conv.convolve(kv, state.flatten(1, 3))
        return torch.cat([q, convolved], dim=-1), relative_states.unflatten(-1, (self.qkv_proj.num_heads, -1))

    def _scaled_by_position(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [T, *, *]`` times the factor of scores that grows with the position."""
        floor, alpha = self._geometry.log_floor, self._geometry.log_alpha
        assert floor is not None
        rows = by_row("x", "positions") if self._backend is Backend.INVARIANT_TORCH else all_rows
        return rows(_scaled_by_position, x, positions, floor, alpha, self.first_row)

    def _bias(self, relative: Tensor, positions: Tensor) -> Tensor:
        """The biases, as attention takes them: before scores are scaled."""
        bias = self.rel_logits_proj(relative / self._scale)
        if not self.first_row:
            return bias
        rows_after = (positions - self.first_row)[:, None]
        missing = (rows_after >= 0) & (torch.arange(bias.shape[2], device=bias.device) > rows_after)
        return bias.masked_fill(missing[:, None], torch.finfo(bias.dtype).min)


def _scaled_by_position(x: Tensor, positions: Tensor, floor: int, alpha: float, first_row: int) -> Tensor:
    factor = 1.0 + alpha * ((positions + (1 - first_row)).float() / floor).clamp_min(1.0).log()
    return (x.float() * factor[:, None, None]).to(x.dtype)


class RelativeWindowAttention(RelativeAttention):
    """The same over a sliding window; padding rows are zero."""

    @split_op("relative_window", width=lambda layer: layer.output_width)
    def attend(self, projected: Tensor) -> Tensor:
        """``[T, q | k | v | relative] -> [T, num_heads * head_dim]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        qkv, relative = self._split(projected, cache["conv"])
        q, k, v, _ = self._rotated_rows(qkv, cache)
        windows = Windows(cache["k"], cache["v"])
        options: dict[str, Any] = {"scale": self._scale, "backend": self._backend}
        return mix_rows(
            [q, k, v, batch.positions, self._bias(relative, batch.positions)],
            windows,
            batch,
            q.shape[1:],
            lambda q, k, v, positions, bias, *, slots, out: window_attention_decode(
                q, k, v, windows, slots, positions, terms=ScoreTerms(bias=bias), out=out, **options
            ),
            lambda q, k, v, _, bias: window_attention(q, k, v, *windows, batch, bias=bias, **options),
        ).flatten(1)


def relative_attention(
    geometry: RelativeAttentionConfig, config: ModelConfig, context: ModelContext, name: str
) -> RelativeAttention:
    """A layer of the geometry, over all tokens or over a window."""
    layer = RelativeAttention if geometry.window is None else RelativeWindowAttention
    return layer(geometry, config, context, name)
