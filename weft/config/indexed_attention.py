"""Attention over tokens that an indexer selects, as a kind of layer: geometry, cache and costs.

Job: the numbers of an indexer, and of attention (Qwen4-Exp) and latent attention (GLM-5.3) with one. Does not know:
scores, kernels (``ops/indexed_attention``).
"""

from dataclasses import dataclass, replace

from weft.config.attention import AttentionConfig
from weft.config.kimi import LatentAttentionConfig
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec

PLACES_LAYER = "model.pool_places"
"""Name in the layer table of the positions that a model with images stores for all indexers that rotate pools."""
PLACES = LayerSpec(paged=(CacheTensor("places", (3,), "float32"),))  # exact below 2^24
"""Three rotary positions per token. Without images these follow from the token's place in the sequence."""


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Geometry of an indexer, which is whole on every rank.

    Attributes:
        num_heads, dim: heads of the index queries, and the width of queries and keys. All heads share one key.
        pool: consecutive tokens that share one index key.
        count: pools that are selected for each token, at most.
        entry: numbers that a token stores until its pool is complete; 0 if a token is a pool.
        num_weights: weights of the indexer's projections.
    """

    num_heads: int
    dim: int
    pool: int
    count: int
    entry: int
    num_weights: int

    def paged(self, dtypes: CacheDtypes) -> tuple[CacheTensor, ...]:
        """The tensors ``index_keys [dim / pool]`` (``ops/indexed_attention``) and ``index_entries [entry]``."""
        keys = CacheTensor("index_keys", (self.dim // self.pool,), dtypes.model)
        return (keys, CacheTensor("index_entries", (self.entry,), dtypes.model)) if self.entry else (keys,)

    @property
    def flops_per_pair(self) -> float:
        return 2.0 * self.num_heads * self.dim / self.pool


@dataclass(frozen=True, slots=True)
class IndexedLatentConfig:
    """Geometry of latent attention over selected tokens in the whole model.

    Attributes:
        shares: the layer has no indexer, and takes what the nearest indexer of an earlier layer selected.
    """

    latent: LatentAttentionConfig
    indexer: IndexerConfig
    shares: bool = False

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The tensors of latent attention, and those of the indexer."""
        whole, indexer = self.latent.layer_spec(hidden_size, dtypes), self.indexer
        return LayerSpec(
            paged=whole.paged if self.shares else (*whole.paged, *indexer.paged(dtypes)),
            page_multiple=indexer.pool,
            num_weights=whole.num_weights + (0 if self.shares else indexer.num_weights),
            flops_per_token=whole.flops_per_pair * indexer.count * indexer.pool,
            flops_per_pair=0.0 if self.shares else indexer.flops_per_pair,
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split."""
        self.latent.check_shares(tp_size)


@dataclass(frozen=True, slots=True)
class IndexedAttentionConfig:
    """Geometry of grouped-query attention over selected tokens in the whole model."""

    attention: AttentionConfig
    indexer: IndexerConfig

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The tensors of attention in the model's dtype, and those of the indexer."""
        indexer = self.indexer
        whole = self.attention.layer_spec(hidden_size, replace(dtypes, kv=dtypes.model))
        return LayerSpec(
            paged=(*whole.paged, *indexer.paged(dtypes)),
            page_multiple=indexer.pool,
            num_weights=whole.num_weights + indexer.num_weights,
            flops_per_token=whole.flops_per_pair * indexer.count * indexer.pool,
            flops_per_pair=indexer.flops_per_pair,
        )

    def check_shares(self, tp_size: int) -> None:
        self.attention.check_shares(tp_size)
