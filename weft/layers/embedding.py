"""Token embedding and output head, split over the tensor-parallel group by vocabulary.

Job: ids to vectors and vectors to logits. Owns: the vocabulary shards (the last one is padded with zero rows where the
vocabulary does not divide). Does not know: the decoder between them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.layers.context import ModelContext
from weft.layers.weight import RowMap, RowRun, WeightLayout, WeightModule, empty_parameter
from weft.ops.linear import linear


def _shard(vocab_size: int, context: ModelContext) -> RowMap:
    """The rows of one rank. Shards have equal, rounded-up sizes; the last ones may be short or empty."""
    share = -(-vocab_size // context.tp.size)
    start = min(context.tp.rank * share, vocab_size)
    return RowMap(vocab_size, (RowRun(start, 0, min(share, vocab_size - start)),))


def _allocate(
    vocab_size: int, hidden_size: int, rows: RowMap, context: ModelContext, num_more_rows: int = 0
) -> nn.Parameter:
    share = -(-vocab_size // context.tp.size)
    weight = empty_parameter(share + num_more_rows, hidden_size, dtype=context.dtype, device=context.device)
    weight[rows.runs[0].count :].zero_()
    return weight


class VocabParallelEmbedding(WeightModule):
    """``[T] int64 -> [T, hidden_size]``, this rank's part of the sum: ids of other shards give zeros.

    Attributes:
        vocab_size: ids of all shards.
        media_rows: ``[num_media_rows, hidden_size]``, the vectors of ids from ``vocab_size`` on, for one step. Rank 0
            alone puts them into the sum.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: ModelContext) -> None:
        super().__init__()
        self._tp, self.vocab_size = context.tp, vocab_size
        self._rows = _shard(vocab_size, context)
        num_media_rows = context.num_media_rows
        table = _allocate(vocab_size, hidden_size, self._rows, context, num_media_rows)
        share = len(table) - num_media_rows
        self.weight = nn.Parameter(table[:share], requires_grad=False) if num_media_rows else table
        self._table, self.media_rows = table.detach(), table.detach()[share:]

    def forward(self, ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(ids, self._table)
        run = self._rows.runs[0]
        local = ids - run.source
        foreign = (local < 0) | (local >= run.count)
        if self._tp.rank == 0 and len(self.media_rows):
            beyond = ids - self.vocab_size
            local = torch.where(beyond >= 0, beyond + len(self.weight), local)
            foreign &= beyond < 0
        vectors = F.embedding(local.masked_fill(foreign, 0), self._table)
        return vectors.masked_fill(foreign.unsqueeze(-1), 0.0)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": self._rows.piece(self.weight)},)


class ParallelLMHead(WeightModule):
    """``[N, hidden_size] -> logits [N, vocab_size]`` on every rank.

    Args:
        tied: the embedding whose weight the head shares; the head then has no tensors of its own.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, context: ModelContext, tied: VocabParallelEmbedding | None
    ) -> None:
        super().__init__()
        self._tp, self._backend = context.tp, context.backend
        self._vocab_size, self._tied = vocab_size, tied is not None
        self._rows = _shard(vocab_size, context)
        self.weight = _allocate(vocab_size, hidden_size, self._rows, context) if tied is None else tied.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = linear(hidden, self.weight, backend=self._backend)
        if self._tp.size == 1:
            return logits
        return self._tp.all_gather(logits)[..., : self._vocab_size]

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({} if self._tied else {"weight": self._rows.piece(self.weight)},)
