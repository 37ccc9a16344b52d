"""Attention over a sliding window as a kind of layer: its geometry, how ``config.json`` names it, what it keeps.

A window is a state: of a sequence's keys and values the layer keeps the last ``window`` and nothing else, in a slot. So
the memory of a sequence does not grow with it, a plan counts windows as it counts recurrent states, and a prefix can be
reused where its window was stored whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.attention import AttentionConfig
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec

CHUNK_SIZE = 64
"""Tokens between the windows that a prefill can store without an extra boundary."""


@dataclass(frozen=True, slots=True)
class SlidingWindowConfig:
    """Geometry, of the whole model.

    Attributes:
        attention: heads, norms and rotary embedding.
        window: a token sees itself and the ``window - 1`` tokens before it.
    """

    attention: AttentionConfig
    window: int

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """``k`` and ``v``, ``[window, num_kv_heads, head_dim]``: the entry of a token is its position modulo the
        window."""
        attention = self.attention
        entry = (self.window, attention.num_kv_heads, attention.head_dim)
        return LayerSpec(
            states=tuple(CacheTensor(name, entry, dtypes.model, sharded_dim=1) for name in ("k", "v")),
            chunk_size=CHUNK_SIZE,
            num_weights=attention.layer_spec(hidden_size, dtypes).num_weights,
            flops_per_token=4.0 * attention.num_heads * attention.head_dim * self.window,
        )

    def check_shares(self, tp_size: int) -> None:
        """As attention."""
        self.attention.check_shares(tp_size)
