"""Latent attention over the tokens that an indexer selects (DeepSeek Sparse Attention): full attention in GLM-5.3.

Job: latent attention's projections, and attention over a selection. Owns: which indexer's selection a layer reads. Does
not know: how an indexer selects (``layers/indexer.py``).
"""

import torch
from torch import Tensor

from weft.config.indexed_attention import IndexedLatentConfig
from weft.config.model import ModelConfig
from weft.forward_context import Batch, get_forward_context
from weft.layers.context import ModelContext
from weft.layers.indexer import Selection, WeightedIndexer
from weft.layers.latent_attention import LatentAttention
from weft.ops.indexed_attention import indexed_attention


class IndexedLatentAttention(LatentAttention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum; padding rows are zero.

    Attributes:
        selection: what this layer's indexer selects, or what the layer shares.
    """

    _sees_all = False

    def __init__(self, geometry: IndexedLatentConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        earlier = [layer for layer in context.layers.values() if isinstance(layer, IndexedLatentAttention)]
        super().__init__(geometry.latent, config, context, name)
        self._pool = geometry.indexer.pool
        self.indexer: WeightedIndexer | None = None
        self.selection: Selection
        if geometry.shares:
            self.selection = earlier[-1].selection
            self.selection.is_shared = True
        else:
            assert geometry.latent.query_rank is not None
            self.indexer = WeightedIndexer(geometry.indexer, geometry.latent.query_rank, config, context)
            self.selection = Selection()

    def project(self, hidden_states: Tensor) -> Tensor:
        """``[T, hidden_size] -> [T, queries | latent | the indexer's columns]``."""
        assert self.q_b_proj is not None
        q_a, entry = self.q_a_kv_proj(hidden_states).split(self._low_ranks, dim=-1)
        q_a = self.q_a_layernorm(q_a)
        indexed = [] if self.indexer is None else [self.indexer.project(hidden_states, q_a)]
        return torch.cat([self.q_b_proj(q_a), entry, *indexed], dim=-1)

    def attend_rows(self, projected: Tensor) -> Tensor:
        if self.indexer is None:
            return super().attend_rows(projected)
        context, own = get_forward_context(), sum(self.indexer.widths)
        pools = self.indexer.select(projected[:, -own:], context.caches[self.name], context.batch)
        self.selection.pools = pools
        attended = super().attend_rows(projected[:, :-own])
        if not self.selection.is_shared:
            self.selection.pools = None
        return attended

    def attend_latents(self, q: Tensor, latents: Tensor, batch: Batch, *, skips_begun: bool = False) -> Tensor:
        """``[T, H, entry] -> [T, H, rank]`` over the selected tokens."""
        assert self.selection.pools is not None, "an earlier layer of the pass has selected"
        keys = latents[..., None, : q.shape[2]]
        values = latents[..., None, : self._geometry.rank]
        return indexed_attention(
            q, keys, values, self.selection.pools, batch, pool=self._pool, scale=self._scale, backend=self._backend
        )
