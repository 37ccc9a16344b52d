"""Lightning attention (arXiv 2401.04658) as a kind of layer: geometry, keys in ``config.json``, cache."""

from dataclasses import dataclass

from weft.config.attention import read_head_dim
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.sharding import divide

NORM_EPS = 1e-6
"""Epsilon of the norm over all heads' outputs, whatever the config says of other norms."""


@dataclass(frozen=True, slots=True)
class LightningAttentionConfig:
    """Geometry of linear attention whose heads decay at fixed rates, slower in later layers.

    Attributes:
        num_layers: number of layers of the model. The rates depend on it.
    """

    num_heads: int
    head_dim: int
    num_layers: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    def slopes(self, layer: int) -> list[float]:
        """The rates of all heads in one layer. The state of a head decays by ``exp(-rate)`` per token."""
        share = 1 - layer / (self.num_layers - 1 + 1e-5) + 1e-5
        return [share * 2.0 ** (-8.0 * (head + 1) / self.num_heads) for head in range(self.num_heads)]

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The state ``recurrent [H, D, D]``."""
        state = CacheTensor("recurrent", (self.num_heads, self.head_dim, self.head_dim), dtypes.state, sharded_dim=0)
        return LayerSpec(
            states=(state,),
            num_weights=5 * hidden_size * self.inner_size,
            flops_per_token=5.0 * self.inner_size * self.head_dim,  # decay, write (2), read (2)
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split; the norm over all heads is a sum over the ranks."""
        divide(self.num_heads, tp_size, "num_attention_heads")


def read_lightning_attention(text: JsonObject) -> LightningAttentionConfig:
    """Read the keys, which are those of attention."""
    num_heads = text.integer("num_attention_heads")
    return LightningAttentionConfig(num_heads, read_head_dim(text, num_heads), text.integer("num_hidden_layers"))
