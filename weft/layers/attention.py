"""Full attention of one decoder layer over the paged KV cache.

Job: project, normalise and rotate, store this step's keys and values, attend, gate and project back. Owns: the layer's
projections and norms, and the scales of an FP8 cache. Does not know: who allocated the pages; it finds its cache by its
own name in the forward context.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from weft.config.attention import AttentionConfig
from weft.config.model import ModelConfig
from weft.forward_context import Batch, LayerCache, LogitsRows, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from weft.layers.norm import RMSNorm, SpanningRMSNorm
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, split_rows, whole
from weft.ops.activation import gate_heads, sigmoid_mul
from weft.ops.attention import paged_attention
from weft.ops.fp8 import E4M3
from weft.ops.rotary import CacheSlots, HeadNorms, QkvHeads, qk_norm_rope


class PagedAttention(WeightModule):
    """A kind of attention over pages. Passes break at it, since the page table is gathered for every step.

    Attributes:
        output_width: columns of what ``attend`` returns.
    """

    output_width: int

    @split_op("attention", width=lambda layer: layer.output_width)
    def attend(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, *] -> [T, output_width]``."""
        return self.attend_rows(projected)

    @abstractmethod
    def attend_rows(self, projected: Tensor) -> Tensor:
        """``attend``, at once."""


class Attention(PagedAttention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]`` (rows of padding tokens are arbitrary).

    Args:
        name: key of the layer's KV cache and of its entry in the layer table, for example ``model.layers.3.self_attn``.
    """

    def __init__(self, geometry: AttentionConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._backend = name, context.backend
        self.head_dim, self._scale = geometry.head_dim, geometry.scale or geometry.head_dim**-0.5
        self._in_multiplier, self._out_multiplier = geometry.in_multiplier, geometry.out_multiplier
        self._eps, self._zero_centered = config.rms_norm_eps, config.zero_centered_norm
        self._cos_sin = context.rotary.get(
            geometry.rope, config.max_position_embeddings, context.num_rotary_rows, context.device
        )
        self.qkv_proj = QKVParallelLinear(
            geometry.input_size or config.hidden_size,
            geometry.head_dim,
            geometry.num_heads,
            geometry.num_kv_heads,
            gate=geometry.output_gate,
            bias=geometry.qkv_bias,
            context=context,
        )
        local_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self._heads = QkvHeads(*local_heads, geometry.head_dim, geometry.output_gate)
        self.output_width = self.qkv_proj.num_heads * geometry.head_dim
        self.o_proj = RowParallelLinear(
            geometry.num_heads * geometry.head_dim,
            config.hidden_size,
            bias=geometry.output_bias,
            context=context,
            what="num_attention_heads * head_dim",
        )
        self.g_proj: ColumnParallelLinear | None = None
        if geometry.head_gate:
            self.g_proj = ColumnParallelLinear(
                config.hidden_size, geometry.num_heads, bias=False, context=context, what="num_attention_heads"
            )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self._norm_spans_heads = geometry.qk_norm_spans_heads
        if geometry.qk_norm:
            self.q_norm, self.k_norm = self._head_norms(geometry, context)
        self.sinks: nn.Parameter | None = None
        if geometry.sinks:
            self.sinks = empty_parameter(self.qkv_proj.num_heads, dtype=context.dtype, device=context.device)
        self._sink_rows = split_rows([geometry.num_heads], context.tp, "num_attention_heads")
        self.k_scale: nn.Parameter | None = None
        self.v_scale: nn.Parameter | None = None
        if config.quantization is not None and config.quantization.kv_cache:
            self.k_scale = empty_parameter(1, dtype=torch.float32, device=context.device)
            self.v_scale = empty_parameter(1, dtype=torch.float32, device=context.device)
        context.layers.register(name, self)

    def _head_norms(self, geometry: AttentionConfig, context: ModelContext) -> list[RMSNorm]:
        if not geometry.qk_norm_spans_heads:
            return [RMSNorm(geometry.head_dim, self._eps, context, zero_centered=self._zero_centered) for _ in "qk"]
        return [
            SpanningRMSNorm(rows, self._eps, context, zero_centered=self._zero_centered)
            for rows in self.qkv_proj.head_rows
        ]

    def layouts(self) -> tuple[WeightLayout, ...]:
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        layout = {name: whole(scale) for name, scale in scales.items() if scale is not None}
        if self.sinks is not None:
            layout["sinks"] = self._sink_rows.piece(self.sinks)
        return (layout,)

    def initial_range(self, name: str) -> tuple[float, float]:
        """Scales of an FP8 cache: keys and values of order one use most of what e4m3 can hold. Sinks are scores."""
        return (-1.0, 1.0) if name == "sinks" else (0.01, 0.02)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._output(self._gate_heads(self.attend(self._project(hidden_states)), hidden_states))

    def forward_rows(self, hidden_states: Tensor, rows: LogitsRows) -> Tensor:
        """``[T, hidden_size] -> [N, hidden_size]``: all keys and values into the cache, and the output of ``rows``."""
        q, gate = self._rotate_and_store(self._project(hidden_states))
        if self._backend.is_invariant:  # alone, these rows would be decodes, which add keys in another order
            attended = rows.of(self._attended(q, gate, get_forward_context().batch))
        else:
            # Torch's launches, which pick the rows, wait until keys and values are stored: attention reads them early.
            attended = self._attended(rows.of(q), rows.of(gate) if gate is not None else None, rows.batch)
        return self._output(attended if self.g_proj is None else self._gate_heads(attended, rows.of(hidden_states)))

    def attend_rows(self, qkv: Tensor) -> Tensor:
        """``[T, q | gate | k | v] -> [T, num_heads * head_dim]``."""
        return self._attended(*self._rotate_and_store(qkv), get_forward_context().batch)

    def _rotate_and_store(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        scaled = self._scales(cache)
        return self._rotate(qkv, batch.positions, cache["k"], cache["v"], batch.slot_mapping, scaled=scaled)

    def _rotated_rows(self, qkv: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of this step, a row per token, and the output gate. ``cache`` has other keys."""
        rows, batch = qkv.shape[0], get_forward_context().batch
        k, v = (qkv.new_empty(rows, 1, *cache[name].shape[2:]) for name in ("k", "v"))  # a cache with a page per token
        own_pages = torch.arange(rows, device=qkv.device)
        q, gate = self._rotate(qkv, batch.positions, k, v, own_pages, scaled=False)
        return q, k.squeeze(1), v.squeeze(1), gate

    def _project(self, hidden_states: Tensor) -> Tensor:
        """``[T, hidden_size] -> [T, q | gate | k | v]``."""
        if self._in_multiplier != 1.0:
            hidden_states = hidden_states * self._in_multiplier
        qkv = self.qkv_proj(hidden_states)
        if self._norm_spans_heads and self.q_norm is not None and self.k_norm is not None:
            qkv = self._normalize_whole(qkv, self.q_norm, self.k_norm)
        return qkv

    @property
    def output_projection(self) -> RowParallelLinear | None:
        """Return the linear layer that produces this layer's output; None if its output is scaled."""
        return self.o_proj if self._out_multiplier == 1.0 else None

    def _gate_heads(self, attended: Tensor, hidden_states: Tensor) -> Tensor:
        """Multiply the heads of ``[T, num_heads * head_dim]`` by their gates, if the layer has them."""
        if self.g_proj is None:
            return attended
        heads = attended.unflatten(-1, (-1, self.head_dim))
        return gate_heads(heads, self.g_proj(hidden_states), backend=self._backend).flatten(-2)

    def _output(self, attended: Tensor) -> Tensor:
        out = self.o_proj(attended)
        return out if self._out_multiplier == 1.0 else out * self._out_multiplier

    def _attended(self, q: Tensor, gate: Tensor | None, batch: Batch) -> Tensor:
        """The batch's queries ``[T, num_heads, head_dim]`` over what the cache holds: ``[T, num_heads * head_dim]``."""
        cache = get_forward_context().caches[self.name]
        attended = paged_attention(
            q,
            cache["k"],
            cache["v"],
            batch,
            scale=self._scale,
            sinks=self.sinks,
            v_scale=self.v_scale if self._scales(cache) else None,
            backend=self._backend,
        ).flatten(1)
        return attended if gate is None else sigmoid_mul(attended, gate, backend=self._backend)

    def _scales(self, cache: LayerCache) -> bool:
        """Whether keys and values are stored divided by the checkpoint's scales."""
        return cache["k"].dtype is E4M3 and self.k_scale is not None

    def _rotate(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, scaled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Queries and the output gate as attention takes them; keys and values into the cache. See ``qk_norm_rope``."""
        k_scale, v_scale = (self.k_scale, self.v_scale) if scaled else (None, None)
        slots = CacheSlots(k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return qk_norm_rope(qkv, self._heads, self._norms(), self._cos_sin, positions, slots, backend=self._backend)

    def _norms(self) -> HeadNorms:
        """The norms of heads that ``qk_norm_rope`` computes."""
        q_norm, k_norm = (None, None) if self._norm_spans_heads else (self.q_norm, self.k_norm)
        q_weight, k_weight = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        return HeadNorms(q_weight, k_weight, self._eps, self._zero_centered)

    def _normalize_whole(self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """The projection with all query heads normalised together, and all key heads."""
        q, *gate, k, v = qkv.split(self.qkv_proj.split_sizes, dim=-1)
        return torch.cat([q_norm(q), *gate, k_norm(k), v], dim=-1)
