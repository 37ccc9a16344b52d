"""Transformer blocks whose weights several layers read (Zamba, arXiv 2405.16712 and 2411.15242): geometry, cache."""

from dataclasses import dataclass

from weft.config.attention import AttentionConfig
from weft.config.layer_spec import CacheDtypes, LayerSpec
from weft.config.sharding import divide


@dataclass(frozen=True, slots=True)
class SharedBlockConfig:
    """Geometry of shared blocks in the whole model. Layers take turns with ``num_blocks`` blocks.

    A block is attention and an MLP. It reads the layer's input beside the token embeddings.

    Attributes:
        layers: decoder layers that use a block, in order.
        attention: its input is twice as wide as the hidden states. Every layer has keys and values of its own.
        intermediate_size: width of the MLP.
        attention_rank, mlp_rank: rank of each layer's own additions to the input projections of attention and MLP; 0:
            no additions.
    """

    layers: tuple[int, ...]
    num_blocks: int
    attention: AttentionConfig
    intermediate_size: int
    attention_rank: int = 0
    mlp_rank: int = 0

    def owner_of(self, layer: int) -> int:
        """The first decoder layer with the block that ``layer`` uses. Its module owns the weights."""
        return self.layers[self.layers.index(layer) % self.num_blocks]

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The cache of the attention, and the costs of one use of a block with the layer's own parts."""
        attention = self.attention.layer_spec(hidden_size, dtypes)
        shared = attention.num_weights + 3 * hidden_size * self.intermediate_size
        heads = (self.attention.num_heads + 2 * self.attention.num_kv_heads) * self.attention.head_dim
        own = hidden_size**2 + self.attention_rank * (3 * 2 * hidden_size + heads)
        own += self.mlp_rank * (hidden_size + 2 * self.intermediate_size)
        others = max(0, len(self.layers) - self.num_blocks)
        return LayerSpec(
            paged=attention.paged,
            num_weights=shared + own,
            num_reused_weights=shared * others / len(self.layers),
            flops_per_pair=attention.flops_per_pair,
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads and the MLP's width are split; so are the columns of the layer's own output projection."""
        self.attention.check_shares(tp_size)
        divide(self.intermediate_size, tp_size, "intermediate_size")
