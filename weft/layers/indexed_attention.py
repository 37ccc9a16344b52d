"""Grouped-query attention over the tokens that an indexer selects: full attention in Qwen4-Exp.

Job: attention's projections, norms, rotation and gate, and attention over a selection. Does not know: how an indexer
selects (``layers/indexer.py``).
"""

import torch
from torch import Tensor

from weft.config.indexed_attention import IndexedAttentionConfig
from weft.config.model import ModelConfig
from weft.forward_context import LogitsRows, get_forward_context
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.indexer import MeanIndexer, PlacedIndexer
from weft.ops.activation import sigmoid_mul
from weft.ops.indexed_attention import indexed_attention


class IndexedAttention(Attention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum; padding rows are zero."""

    def __init__(self, geometry: IndexedAttentionConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(geometry.attention, config, context, name)
        indexer = PlacedIndexer if config.runs_vision else MeanIndexer
        self.indexer = indexer(geometry.indexer, self._cos_sin, config, context)

    def forward_rows(self, hidden_states: Tensor, rows: LogitsRows) -> Tensor:
        """``[T, hidden_size] -> [N, hidden_size]``: attention of all rows, the output of ``rows``."""
        return self._output(rows.of(self.attend(self._project(hidden_states))))

    def _project(self, hidden_states: Tensor) -> Tensor:
        """``[T, hidden_size] -> [T, q | gate | k | v | the indexer's columns]``."""
        return torch.cat([super()._project(hidden_states), self.indexer.project(hidden_states)], dim=-1)

    def attend_rows(self, projected: Tensor) -> Tensor:
        context, own = get_forward_context(), sum(self.indexer.widths)
        batch, cache = context.batch, context.caches[self.name]
        pools = self.indexer.select(projected[:, -own:], cache, batch)
        q, gate = self._rotate_and_store(projected[:, :-own].contiguous())
        attended = indexed_attention(
            q,
            cache["k"],
            cache["v"],
            pools,
            batch,
            pool=self.indexer.geometry.pool,
            scale=self._scale,
            backend=self._backend,
        ).flatten(1)
        return attended if gate is None else sigmoid_mul(attended, gate, backend=self._backend)
