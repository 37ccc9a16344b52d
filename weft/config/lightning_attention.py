"""Lightning attention (arXiv 2401.04658) as a kind of layer: its geometry, its keys, what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.attention import read_head_dim
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide

NORM_EPS = 1e-6
"""Of the norm over all heads' outputs, whatever the config says of the others."""


@dataclass(frozen=True, slots=True)
class LightningAttentionConfig:
    """Geometry of linear attention whose heads decay at fixed rates, slower ones in later layers.

    Attributes:
        num_layers: of the model, on which the rates depend.
    """

    num_heads: int
    head_dim: int
    num_layers: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    def slopes(self, layer: int) -> list[float]:
        """The rate of every head in one layer: a head's state decays by ``exp(-rate)`` per token."""
        share = 1 - layer / (self.num_layers - 1 + 1e-5) + 1e-5
        return [share * 2.0 ** (-8.0 * (head + 1) / self.num_heads) for head in range(self.num_heads)]

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """``recurrent [H, D, D]``."""
        state = CacheTensor("recurrent", (self.num_heads, self.head_dim, self.head_dim), dtypes.state, sharded_dim=0)
        return LayerSpec(
            states=(state,),
            num_weights=5 * hidden_size * self.inner_size,
            flops_per_token=5.0 * self.inner_size * self.head_dim,  # decay, write (2), read (2)
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split; the norm over all of them sums over the ranks."""
        divide(self.num_heads, tp_size, "num_attention_heads")


def read_lightning_attention(text: JsonObject) -> LightningAttentionConfig:
    """Read the keys that it shares with attention."""
    num_heads = text.integer("num_attention_heads")
    return LightningAttentionConfig(num_heads, read_head_dim(text, num_heads), text.integer("num_hidden_layers"))
