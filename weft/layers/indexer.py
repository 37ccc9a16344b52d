"""Indexers, which select the tokens that sparse attention reads.

Job: index queries, weights of their heads, index keys and their pools. Owns: the indexer's projections, whole on every
rank. Does not know: the attention that reads the selection.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.indexed_attention import PLACES_LAYER, IndexerConfig
from weft.config.model import ModelConfig
from weft.forward_context import Batch, LayerCache, get_forward_context
from weft.layers.context import ModelContext
from weft.layers.linear import MergedReplicatedLinear, PackedLinear
from weft.layers.norm import RMSNorm
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, whole, whole_rows
from weft.ops.indexed_attention import pool_entries, select_pools, store_index_keys
from weft.ops.rotary import apply_rotary
from weft.ops.rotary.axes import frequency_axes, rotary_rows

_NORM_EPS = 1e-6
"""Epsilon of the keys' norm, whatever the model's is."""


class Selection:
    """The pools that an indexer selected in the running pass, for later layers that share them.

    Attributes:
        is_shared: a later layer reads ``pools``.
        pools: of ``select_pools``; it is kept only if it is shared.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self.pools: Tensor | None = None


class KeyNorm(WeightModule):
    """LayerNorm of index keys: ``[T, dim] -> [T, dim]``."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.register_parameter(name, empty_parameter(size, dtype=context.dtype, device=context.device))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.get_parameter("weight"), self.get_parameter("bias"), _NORM_EPS)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: whole(parameter) for name, parameter in self.named_parameters()},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return (0.9, 1.1) if name == "weight" else (-0.1, 0.1)


class WeightedIndexer(WeightModule):
    """The indexer of DeepSeek-V3.2 with pools (GLM-5.3): queries from latents, one weight per head and token.

    The key of a pool is the average of its tokens' keys, weighted per channel by a softmax over the pool. The softmax
    reads a projection of the hidden states plus a learned number per place in the pool.
    """

    def __init__(self, geometry: IndexerConfig, query_rank: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.geometry, self._backend = geometry, context.backend
        heads, dim = geometry.num_heads, geometry.dim
        self.wq_b = PackedLinear(query_rank, {"": whole_rows(heads * dim)}, bias=False, context=context)
        self.in_proj = MergedReplicatedLinear(config.hidden_size, [dim, dim, heads], context=context)
        self.k_norm = KeyNorm(dim, context)
        self.places: nn.Parameter = empty_parameter(geometry.pool, dim, dtype=context.dtype, device=context.device)
        self.widths = [heads * dim, dim, dim, heads]

    def project(self, hidden_states: Tensor, latent: Tensor) -> Tensor:
        """``[T, hidden_size]`` and ``[T, query_rank]`` to ``[T, queries | key | logits | head weights]``."""
        key, logits, weights = self.in_proj(hidden_states)[:, : sum(self.widths[1:])].split(self.widths[1:], dim=-1)
        return torch.cat([self.wq_b(latent), self.k_norm(key), logits, weights], dim=-1)

    def select(self, projected: Tensor, cache: LayerCache, batch: Batch) -> Tensor:
        """Store this step's keys, and select pools for each token: ``[T, count]`` int32."""
        geometry = self.geometry
        q, key, logits, weights = projected.split(self.widths, dim=-1)
        entries, slots = cache["index_entries"], batch.slot_mapping
        entries.flatten(0, 1).index_copy_(0, slots, torch.cat([key, logits], dim=-1).to(entries.dtype))
        keys, logits = pool_entries(entries, slots, geometry.pool).chunk(2, dim=-1)
        shares = (logits.float() + self.places.float()).softmax(1).to(keys.dtype)
        store_index_keys((shares * keys).sum(1), cache["index_keys"], slots, geometry.pool)
        return select_pools(
            q.unflatten(-1, (geometry.num_heads, geometry.dim)),
            weights,
            cache["index_keys"],
            batch,
            pool=geometry.pool,
            count=geometry.count,
            backend=self._backend,
        )

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"index_kpool_compress_ape": whole(self.places)},)


class MeanIndexer(WeightModule):
    """The indexer of Qwen4-Exp: heads count alike, and the key of a pool is the mean of its tokens' keys.

    Queries, and means, are normalised and rotated, the mean as the first token of its pool.
    """

    def __init__(self, geometry: IndexerConfig, cos_sin: Tensor, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.geometry, self._backend, self._cos_sin = geometry, context.backend, cos_sin
        self.widths = [geometry.num_heads * geometry.dim, geometry.dim]
        columns = {"": whole_rows(sum(self.widths))}
        self.index_qk_proj = PackedLinear(config.hidden_size, columns, bias=False, context=context)
        self.q_layernorm, self.k_layernorm = (
            RMSNorm(geometry.dim, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm) for _ in "qk"
        )

    def project(self, hidden_states: Tensor) -> Tensor:
        """``[T, hidden_size] -> [T, queries | key]``."""
        projected: Tensor = self.index_qk_proj(hidden_states)
        return projected

    def select(self, projected: Tensor, cache: LayerCache, batch: Batch) -> Tensor:
        """Store this step's keys, and select pools for each token: ``[T, count]`` int32."""
        geometry, slots = self.geometry, batch.slot_mapping
        q, key = projected.split(self.widths, dim=-1)
        entries = cache["index_entries"]
        entries.flatten(0, 1).index_copy_(0, slots, key.to(entries.dtype))
        means = pool_entries(entries, slots, geometry.pool).float().mean(1).to(key.dtype)
        keys = self._rotate_keys(self.k_layernorm(means)[:, None], batch)[:, 0]
        store_index_keys(keys, cache["index_keys"], slots, geometry.pool)
        q = self.q_layernorm(q.unflatten(-1, (geometry.num_heads, geometry.dim)))
        return select_pools(
            self._rotate(q, batch.positions).contiguous(),
            None,
            cache["index_keys"],
            batch,
            pool=geometry.pool,
            count=geometry.count,
            backend=self._backend,
        )

    def _rotate_keys(self, keys: Tensor, batch: Batch) -> Tensor:
        """Rotate the keys ``[T, 1, dim]`` of the pools that end with the batch's tokens. Other rows are arbitrary."""
        return self._rotate(keys, (batch.positions - (self.geometry.pool - 1)).clamp(min=0))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return apply_rotary(x, x[:, :0], positions, self._cos_sin)[0]

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)


class PoolPlaces:
    """The three rotary positions of every token, for all indexers of a model that reads images.

    A pool may begin at an image's token, at text before an image, or in an earlier step. The pages of ``PLACES_LAYER``
    store the positions.

    Attributes:
        table: ``[rows, 3]`` float32, the positions in each row of the rotary table. The rows of image tokens are
            written before each step.
    """

    def __init__(self, cos_sin: Tensor, sections: tuple[int, int, int], context: ModelContext) -> None:
        self._cos_sin, self._axes = cos_sin, frequency_axes(cos_sin.shape[1], sections).to(context.device)
        self.table = torch.arange(len(cos_sin), dtype=torch.float32, device=context.device)[:, None].repeat(1, 3)
        self._rows, self._order = cos_sin[:0], torch.arange(0)
        context.layers.register(PLACES_LAYER, self)

    def place_media(self, rows: Tensor, positions: Tensor) -> None:
        """Write the positions ``[3, N]`` of image tokens into ``rows [N]`` of the table."""
        self.table.index_copy_(0, rows, positions.transpose(0, 1).to(self.table.dtype))

    def begin_pass(self, batch: Batch, pool: int) -> None:
        """Store the positions of the batch's tokens, and look up the rotation of each pool that ends in the batch."""
        slots, places = batch.slot_mapping, get_forward_context().caches[PLACES_LAYER]["places"].flatten(0, 1)
        places.index_copy_(0, slots, self.table.index_select(0, batch.positions))
        # Where no pool ends, the place may be anything, NaN included: any row of the table will do.
        firsts = places[(slots - (pool - 1)).clamp(min=0)].long().clamp(0, len(self._cos_sin) - 1)
        self._rows = rotary_rows(self._cos_sin, firsts.transpose(0, 1), self._axes)
        self._order = torch.arange(len(slots), device=slots.device)

    def rotate(self, keys: Tensor) -> Tensor:
        """Rotate the keys ``[T, 1, dim]`` of the pools that end with the running pass's tokens."""
        return apply_rotary(keys, keys[:, :0], self._order, self._rows)[0]


class PlacedIndexer(MeanIndexer):
    """``MeanIndexer`` of a model that reads images.

    Attributes:
        begins_pass: the indexer begins the pass of ``PoolPlaces``. The model's first indexer does so for the others. A
            head that drafts runs over other batches, so its indexer does too.
    """

    def __init__(self, geometry: IndexerConfig, cos_sin: Tensor, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(geometry, cos_sin, config, context)
        assert config.vision is not None and config.vision.mrope_section is not None
        found: PoolPlaces | None = context.layers.get(PLACES_LAYER)
        self.begins_pass = found is None
        self._places = found or PoolPlaces(cos_sin, config.vision.mrope_section, context)

    def _rotate_keys(self, keys: Tensor, batch: Batch) -> Tensor:
        if self.begins_pass:
            self._places.begin_pass(batch, self.geometry.pool)
        return self._places.rotate(keys)
