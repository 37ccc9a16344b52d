"""Full attention of one decoder layer over the paged KV cache.

Job: project, normalise and rotate, store this step's keys and values, attend, gate and project back. Owns: the layer's
projections and norms. Does not know: who allocated the pages; it finds its cache by its own name in the forward
context.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.forward_context import get_forward_context
from weft.layers.context import ModelContext
from weft.layers.linear import QKVParallelLinear, RowParallelLinear
from weft.layers.norm import RMSNorm
from weft.layers.rotary import RotaryEmbedding
from weft.ops.attention import paged_attention
from weft.ops.kv_cache import store_kv


class Attention(nn.Module):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]`` (rows of padding tokens are arbitrary).

    Args:
        name: key of the layer's KV cache and of its entry in the layer table, for example ``model.layers.3.self_attn``.
        rotary: shared by all layers of the model.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.name, self._backend = name, context.backend
        self._head_dim, self._scale = config.head_dim, config.head_dim**-0.5
        self._gated = config.attn_output_gate
        self._rotary = (rotary,)  # in a tuple: the model owns the module, this layer only refers to it
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            gate=config.attn_output_gate,
            bias=config.attention_bias,
            context=context,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            context=context,
            what="num_attention_heads * head_dim",
        )
        self.q_norm, self.k_norm = None, None
        if config.qk_norm:
            eps, centred = config.rms_norm_eps, config.zero_centered_norm
            self.q_norm = RMSNorm(config.head_dim, eps, context, zero_centered=centred)
            self.k_norm = RMSNorm(config.head_dim, eps, context, zero_centered=centred)
        context.layers.register(name, "full_attention", self)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v, gate = self._project(hidden_states)
        attended = self._attend(q, k, v).flatten(1)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.o_proj(attended)

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``q [T, Hq, D]``, ``k`` and ``v [T, Hkv, D]``, normalised but not rotated, and the gate ``[T, Hq * D]``."""
        gate = None
        parts = self.qkv_proj(hidden_states).split(self.qkv_proj.split_sizes, dim=-1)
        if self._gated:
            q, gate, k, v = parts
        else:
            q, k, v = parts
        q, k, v = (x.unflatten(-1, (-1, self._head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v, gate

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = get_forward_context()
        batch, cache = context.batch, context.kv_cache(self.name)
        q, k = self._rotary[0](q, k, batch.positions)
        store_kv(k, v, cache.k, cache.v, batch.slot_mapping, backend=self._backend)
        return paged_attention(q, cache.k, cache.v, batch, scale=self._scale, backend=self._backend)
