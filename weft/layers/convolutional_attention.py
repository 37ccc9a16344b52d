"""Attention whose queries and keys pass two convolutions (CCA, arXiv 2510.04476), over all tokens or a window.

Job: convolve queries and keys, delay half of the value channels by a token, normalise heads. Owns: the weights of the
convolutions, and a temperature per key head. Does not know: pages and windows, which the base classes use.

One depthwise convolution computes everything that reads earlier tokens. The matrix of a head reads the first
convolution at several tokens. Each channel of queries and keys therefore occurs once per token, with shifted taps. A
value channel has a single tap of one, at the token itself or at the token before it.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.convolutional_attention import ConvolutionalAttentionConfig
from weft.config.model import ModelConfig
from weft.forward_context import get_forward_context
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.linear import QKVParallelLinear
from weft.layers.short_conv import convolve_rows
from weft.layers.sliding_window import SlidingWindowAttention
from weft.layers.weight import RowMap, RowRun, WeightLayout, WeightModule, WeightPiece, empty_parameter, uniform_range
from weft.ops.backend import Backend
from weft.ops.linear import head_linear
from weft.ops.rotary import HeadNorms
from weft.ops.rows import by_row, whole

_EPS = 1e-16
"""Added to the mean square of a head, for heads of zeros."""


def _half(rows: RowMap, start: int) -> RowMap:
    """The rows of ``rows`` that a tensor with half of them holds, from row ``start`` on."""
    half, runs = rows.total // 2, []
    for run in rows.runs:
        first, end = max(run.source, start), min(run.source + run.count, start + half)
        if first < end:
            runs.append(RowRun(first - start, run.target + first - run.source, end - first))
    return RowMap(half, tuple(runs))


def _split_values(projection: QKVParallelLinear) -> RowMap:
    """Let a projection read its values from two tensors. Returns which of its value channels the second one has."""
    queries, keys = projection.head_rows
    parts, current, delayed = projection.shard.parts, _half(keys, 0), _half(keys, keys.total // 2)
    place = queries.count + keys.count
    values = {"2.": current.moved(place), "3.": delayed.moved(place)}
    projection.shard = replace(projection.shard, parts=parts | values)
    return delayed


class DelayedConv(WeightModule):
    """The depthwise convolution. Its channels are ``[H, tokens, D]`` of queries and keys, then those of values.

    Args:
        delayed: which value channels read the token before.

    Attributes:
        weight, bias: ``[C, W]`` and ``[C]``; zeros, but for taps.
        copies, copied_bias: views ``[H, tokens, D, taps]`` and ``[H, tokens, D]`` of these. The last copies are the
            parameters ``taps`` and ``taps_bias``.
        channels: ``[C]``, the column of each channel in the projection.
        delayed: mask ``[values]`` of the value channels that read the token before.
    """

    weight: Tensor
    bias: Tensor
    channels: Tensor
    delayed: Tensor

    def __init__(
        self, geometry: ConvolutionalAttentionConfig, heads: int, values: int, delayed: RowMap, context: ModelContext
    ) -> None:
        super().__init__()
        size, tokens, width = geometry.attention.head_dim, geometry.head_kernel, geometry.taps
        rows, shape = heads * tokens * size, (heads, tokens, size)
        dense = torch.zeros(rows + values, width, dtype=context.dtype, device=context.device)
        mask = torch.zeros(values, dtype=torch.bool, device=context.device)
        for run in delayed.runs:
            mask[run.target_rows] = True
        columns = torch.arange(heads * size + values, device=context.device)
        own, of_values = columns.split([heads * size, values])
        channels = torch.cat([own.view(heads, 1, size).expand(shape).flatten(), of_values])
        buffers = {"weight": dense, "bias": dense.new_zeros(len(dense)), "channels": channels, "delayed": mask}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        # The copy of a channel for a token reads one token further on than the copy before it.
        taps, steps = geometry.channel_kernel, (tokens * size * width, size * width + 1, width, 1)
        self.copies = dense.as_strided((*shape, taps), steps, width - (tokens + taps - 1))
        self.copied_bias = self.bias[:rows].view(shape)
        self.taps = nn.Parameter(self.copies[:, -1], requires_grad=False)
        self.taps_bias = nn.Parameter(self.copied_bias[:, -1], requires_grad=False)
        self.set_values()

    def set_values(self) -> None:
        """Set the taps of value channels."""
        rows = self.weight[-len(self.delayed) :]
        rows[:, -1], rows[:, -2] = ~self.delayed, self.delayed

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)


class _ValueTaps:
    """Sets the constant taps whenever a checkpoint is loaded: memory may have been given back in between."""

    def __init__(self, conv: DelayedConv) -> None:
        self._conv = conv

    def copy_(self, source: Tensor) -> None:
        self._conv.set_values()


class HeadConvs(WeightModule):
    """Both convolutions of the query heads and key heads of this rank. H: heads, D: size of a head.

    Attributes:
        grouped, grouped_bias: ``[H, tokens * D, D]`` and ``[H, D]`` of the second convolution.
    """

    def __init__(
        self, geometry: ConvolutionalAttentionConfig, projection: QKVParallelLinear, context: ModelContext
    ) -> None:
        super().__init__()
        delayed = _split_values(projection)
        queries, keys = projection.head_rows
        size = self._size = geometry.attention.head_dim
        self._total = queries.total + keys.total
        first = [rows.runs[0].source + before for rows, before in ((queries, 0), (keys, queries.total))]
        counts = projection.num_heads, projection.num_kv_heads
        self._rows = [start + i * size for start, count in zip(first, counts, strict=True) for i in range(count)]
        heads, tokens = len(self._rows), geometry.head_kernel
        self.conv = DelayedConv(geometry, heads, keys.count, delayed, context)
        own: dict[str, Any] = {"dtype": context.dtype, "device": context.device}
        self.grouped = empty_parameter(heads, tokens * size, size, **own)
        self.grouped_bias = empty_parameter(heads, size, **own)

    def layouts(self) -> tuple[WeightLayout, ...]:
        conv, size = self.conv, self._size
        kernel, taps = conv.copies.shape[1], conv.copies.shape[3]
        grouped = self.grouped.view(-1, kernel, size, size).permute(0, 3, 2, 1)
        layout = {
            "conv_qk_depthwise.weight": self._piece(conv.copies.unsqueeze(3), 1, taps),
            "conv_qk_depthwise.bias": self._piece(conv.copied_bias),
            "conv_qk_grouped.weight": self._piece(grouped[:, None], size, kernel),
            "conv_qk_grouped.bias": self._piece(self.grouped_bias[:, None]),
        }
        piece = layout["conv_qk_depthwise.bias"]
        always = (((slice(0, 1),), _ValueTaps(conv)),)
        layout["conv_qk_depthwise.bias"] = replace(piece, copies=piece.copies + always)
        return (layout,)

    def _piece(self, heads: Tensor, *rest: int) -> WeightPiece:
        """The piece that fills ``heads [H, copies, D, *rest]``, each head from its rows."""
        copies = tuple(
            ((slice(first, first + self._size),), target)
            for first, copies in zip(self._rows, heads, strict=True)
            for target in copies
        )
        return WeightPiece((self._total, *rest), copies)

    def initial_range(self, name: str) -> tuple[float, float]:
        return uniform_range(self.grouped.shape[1]) if name == "grouped" else super().initial_range(name)


class HeadScales(WeightModule):
    """The norm of query and key heads: unit root mean square, then a temperature per key head.

    Queries are multiplied by the temperature of their key head, which gives the same scores.

    Attributes:
        weight: ones ``[D]``.
        temp: ``[num_kv_heads]``.
    """

    weight: Tensor

    def __init__(self, size: int, keys: RowMap, context: ModelContext) -> None:
        super().__init__()
        self._heads = RowMap(
            keys.total // size,
            tuple(RowRun(run.source // size, run.target // size, run.count // size) for run in keys.runs),
        )
        self.register_buffer("weight", torch.ones(size, dtype=context.dtype, device=context.device), persistent=False)
        self.temp = empty_parameter(self._heads.count, dtype=context.dtype, device=context.device)

    def of_queries(self, q: Tensor) -> Tensor:
        """Multiply ``[T, num_heads, D]``."""
        grouped = q.unflatten(1, (len(self.temp), -1))
        return (grouped * self.temp[:, None, None]).flatten(1, 2)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"temp": self._heads.piece(self.temp)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


class ConvolutionalAttention(Attention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum, over all tokens."""

    def __init__(
        self, geometry: ConvolutionalAttentionConfig, config: ModelConfig, context: ModelContext, name: str
    ) -> None:
        super().__init__(geometry.mixer, config, context, name)  # type: ignore[arg-type]  # windows have their own
        self.conv_qk = HeadConvs(geometry, self.qkv_proj, context)
        self.qk_norm = HeadScales(self.head_dim, self.qkv_proj.head_rows[1], context)

    def _norms(self) -> HeadNorms:
        return HeadNorms(self.qk_norm.weight, self.qk_norm.weight, _EPS, zero_centered=False)

    def _rotate(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, scaled: bool
    ) -> tuple[Tensor, Tensor | None]:
        qkv = self._convolve(qkv, positions)
        q, gate = super()._rotate(qkv, positions, k_cache, v_cache, slot_mapping, scaled=scaled)
        return self.qk_norm.of_queries(q), gate

    def _convolve(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """``[T, q | k | v] -> [T, q | k | v]``, which norms and rotation follow."""
        heads, kv_heads, size = self._heads.num_heads, self._heads.num_kv_heads, self.head_dim
        values = kv_heads * size
        taps, state = self.conv_qk.conv, get_forward_context().caches[self.name]["conv"]
        x = qkv.index_select(1, taps.channels)
        conv = convolve_rows(x, taps.weight, taps.bias, state, silu=False, backend=self._backend)
        copied, v = conv[:, :-values], conv[:, -values:]
        if self.qkv_proj.bias is not None:  # which the token before the first one has, too
            v = torch.where((positions == 0)[:, None] & taps.delayed, self.qkv_proj.bias[-values:], v)
        q, k = qkv[:, : heads * size].unflatten(1, (kv_heads, -1, size)), qkv[:, heads * size : -values]
        rows = by_row("q", "k") if self._backend is Backend.INVARIANT_TORCH else whole
        out = torch.cat([*rows(_mixed, q, k.unflatten(1, (kv_heads, 1, size)), self._backend.is_invariant), v], dim=1)
        own = out[:, :-values].unflatten(1, (-1, size))
        own += self._grouped(copied.unflatten(1, (own.shape[1], -1)))
        return out

    def _grouped(self, copied: Tensor) -> Tensor:
        """The second convolution: ``[T, H, tokens * D] -> [T, H, D]``."""
        weight, bias = self.conv_qk.grouped, self.conv_qk.grouped_bias
        if self._backend.is_invariant:
            return head_linear(copied, weight, backend=self._backend) + bias
        return torch.baddbmm(bias[:, None], copied.transpose(0, 1), weight).transpose(0, 1)


def _mixed(q: Tensor, k: Tensor, in_order: bool) -> tuple[Tensor, Tensor]:
    """Means of each query head ``[T, Hkv, group, D]`` and its key head ``[T, Hkv, 1, D]``, and the means of these by
    group. ``in_order``: add a group's heads one after the other."""
    mixed = torch.lerp(q, k, 0.5)
    means = (reduce(torch.add, mixed.float().unbind(2)) / q.shape[2]).to(q.dtype) if in_order else mixed.mean(2)
    return mixed.flatten(1), means.flatten(1)


class ConvolutionalWindow(ConvolutionalAttention, SlidingWindowAttention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum, over a window."""


def convolutional_attention(
    geometry: ConvolutionalAttentionConfig, config: ModelConfig, context: ModelContext, name: str
) -> ConvolutionalAttention:
    """The layer for a geometry."""
    kind = ConvolutionalAttention if geometry.window is None else ConvolutionalWindow
    return kind(geometry, config, context, name)
