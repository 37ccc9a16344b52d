"""Linear layers, sharded over the tensor-parallel group (Megatron-LM, arXiv 1909.08053).

Job: ``y = x W^T + b`` with W's rows (column parallel: outputs are split) or columns (row parallel: inputs are split)
on different ranks, and projections of the same input merged into one matrix. Owns: which rows and columns a rank holds,
and the bias. Does not know: how the matrix is stored and multiplied (its ``quant_method``), what the outputs mean
beyond heads and parts, or checkpoint names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from weft.config.sharding import divide, head_range
from weft.forward_context import serves_any_num_tokens
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.quant_method import QuantMethod
from weft.layers.weight import (
    MatrixShard,
    RowMap,
    RowRun,
    WeightLayout,
    WeightModule,
    WeightPiece,
    empty_parameter,
    split_rows,
    stacked,
    whole_rows,
)
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows


class LinearBase(WeightModule):
    """A matrix whose storage its ``quant_method`` knows, and a bias ``[rows]`` in the model's dtype.

    Attributes:
        weight: made by ``quant_method``.
        shard: which rows and columns this rank holds.
        quantizable: whether a checkpoint may hold it quantised.
        places: parameters (``weight``, ``weight_scale``) that are not in memory of their own, and where they are.
    """

    weight: nn.Parameter
    quant_method: LinearMethod
    quantizable: ClassVar[bool] = True

    def __init__(self, shard: MatrixShard, bias: bool, context: ModelContext) -> None:
        super().__init__()
        self.shard, self._tp = shard, context.tp
        self.places: dict[str, Tensor] = {}
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(shard.rows, dtype=context.dtype, device=context.device)
            self.bias[shard.num_filled :].zero_()

    def layouts(self) -> tuple[WeightLayout, ...]:
        return tuple(layout | self._bias_layout() for layout in self.quant_method.layouts(self))

    def _bias_layout(self) -> WeightLayout:
        if self.bias is None:
            return {}
        return {f"{prefix}bias": rows.piece(self.bias) for prefix, rows in self.shard.parts.items()}

    def initial_range(self, name: str) -> tuple[float, float]:
        return super().initial_range(name) if name == "bias" else self.quant_method.initial_range(self, name)


class LinearMethod(QuantMethod[LinearBase]):
    """A matrix ``[N, K]``."""

    @abstractmethod
    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + b``: ``[..., K] -> [..., N]`` in x's dtype."""

    def apply_partial_sums(self, layer: LinearBase, x: Tensor, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        """``x W^T``: ``[T, K] -> [T, N]``, or ``[S, T, N]``, or sent to ``peers``, as
        ``weft.ops.linear.linear_parts``."""
        return self.apply(layer, x, None)

    @abstractmethod
    def apply_silu_mul(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """``silu(x G^T) * (x U^T)`` of a merged ``G`` and ``U``: ``[..., K] -> [..., N / 2]`` in x's dtype."""


class PackedLinear(LinearBase):
    """Projections of one input in one matrix, of whose outputs a rank has some: ``[..., in_features] -> [..., rows]``.

    Args:
        parts: the prefix of each part's tensors -> where its rows go.
        rows: of this rank, if there are more than the parts fill.
    """

    def __init__(
        self, in_features: int, parts: dict[str, RowMap], *, bias: bool, context: ModelContext, rows: int | None = None
    ) -> None:
        filled = sum(part.count for part in parts.values())
        super().__init__(MatrixShard(rows or filled, in_features, parts, 0, in_features), bias, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ColumnParallelLinear(PackedLinear):
    """Outputs split over ranks: ``[..., in_features] -> [..., out_features / tp]``."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, context: ModelContext, what: str = "out_features"
    ) -> None:
        super().__init__(in_features, {"": split_rows([out_features], context.tp, what)}, bias=bias, context=context)


class MergedColumnParallelLinear(PackedLinear):
    """Several column-parallel projections of one input in one matrix; the outputs stand side by side.

    Args:
        out_features: outputs of each part; every one is split over the ranks.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, context: ModelContext, what: str
    ) -> None:
        parts = stacked(*(split_rows([total], context.tp, what) for total in out_features))
        super().__init__(in_features, parts, bias=bias, context=context)

    def silu_mul(self, x: Tensor) -> Tensor:
        """``silu`` of the first of two parts, times the second: ``[..., in_features] -> [..., out_features / tp]``."""
        return self.quant_method.apply_silu_mul(self, x, self.bias)


class QKVParallelLinear(PackedLinear):
    """Queries, keys and values (and the output gate, if any) of the rank's heads from one matrix.

    The output is ``[..., q | gate | k | v]``. In the checkpoint a gated ``q_proj`` holds each head's query rows
    followed by its gate rows; they are separated when the weights are loaded. KV heads are replicated if there
    are fewer than ranks.

    Attributes:
        split_sizes: widths of the output's parts, in order.
        head_rows: which of all heads' rows the queries and the keys are.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        gate: bool,
        bias: bool,
        context: ModelContext,
    ) -> None:
        tp = context.tp
        share = divide(num_heads, tp.size, "num_attention_heads")
        heads = range(tp.rank * share, (tp.rank + 1) * share)
        kv_heads = head_range(num_kv_heads, tp.rank, tp.size, "num_key_value_heads")
        width, kv_width = len(heads) * head_dim, len(kv_heads) * head_dim
        queries = RowMap(num_heads * head_dim, (RowRun(heads.start * head_dim, 0, width),))
        keys = RowMap(num_kv_heads * head_dim, (RowRun(kv_heads.start * head_dim, 0, kv_width),))
        with_gate = _gated_query_rows(heads, num_heads, head_dim) if gate else queries
        super().__init__(hidden_size, stacked(with_gate, keys, keys), bias=bias, context=context)
        self.num_heads, self.num_kv_heads, self.head_rows = len(heads), len(kv_heads), (queries, keys)
        self.split_sizes = [width, width, kv_width, kv_width] if gate else [width, kv_width, kv_width]


def _gated_query_rows(heads: range, num_heads: int, head_dim: int) -> RowMap:
    runs = []
    for local, head in enumerate(heads):
        source, target = 2 * head * head_dim, local * head_dim
        runs.append(RowRun(source, target, head_dim))
        runs.append(RowRun(source + head_dim, len(heads) * head_dim + target, head_dim))
    return RowMap(2 * num_heads * head_dim, tuple(runs))


class RowParallelLinear(LinearBase):
    """Inputs split over ranks: ``[..., in_features / tp] -> [..., out_features]``, this rank's part of the sum.

    The next ``ResidualRMSNorm`` sums over the ranks. Rank 0 alone adds the bias.

    Attributes:
        returns_partial_sums: few rows may come out as parts ``[S, T, out_features]``, which the norm adds
            (``linear_parts``). With several ranks they may be sent to the other ranks already.
    """

    returns_partial_sums = False
    _all_reduce: AllReduce | None = None

    def __init__(self, in_features: int, out_features: int, *, bias: bool, context: ModelContext, what: str) -> None:
        local = divide(in_features, context.tp.size, what)
        parts = {"": whole_rows(out_features)}
        shard = MatrixShard(out_features, local, parts, context.tp.rank * local, in_features)
        super().__init__(shard, bias and context.tp.rank == 0, context)
        self._bias_elsewhere = bias and context.tp.rank > 0

    def return_partial_sums(self, all_reduce: AllReduce | None) -> None:
        """Return partial sums and let the following ``ResidualRMSNorm`` add them. ``all_reduce`` is the norm's."""
        self.returns_partial_sums, self._all_reduce = self.bias is None and not self._bias_elsewhere, all_reduce

    def forward(self, x: Tensor) -> Tensor | SentRows:
        leaves = self.returns_partial_sums and not serves_any_num_tokens()
        if leaves and self._all_reduce is None:
            return self.quant_method.apply_partial_sums(self, x)
        if leaves and self._all_reduce is not None and self._all_reduce.peers(x) is not None:
            return self.quant_method.apply_partial_sums(self, x, self._all_reduce.peers_to_send(x))
        return self.quant_method.apply(self, x, self.bias)

    def _bias_layout(self) -> WeightLayout:
        return {"bias": WeightPiece((self.shard.rows,), ())} if self._bias_elsewhere else super()._bias_layout()


class MergedReplicatedLinear(PackedLinear):
    """Several small projections of one input in one matrix that every rank holds whole (routers).

    The output has zero columns at its end up to a multiple of 8. For rows that are not aligned to 16 bytes the matrix
    library falls back to a kernel that loads element by element: a profile with 513 columns on an H200 shows it.
    """

    ALIGNMENT = 8
    quantizable = False  # published checkpoints keep their routers in the model's dtype

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool = False, context: ModelContext
    ) -> None:
        parts = stacked(*(whole_rows(total) for total in out_features))
        padded = -(-sum(out_features) // self.ALIGNMENT) * self.ALIGNMENT
        super().__init__(in_features, parts, bias=bias, context=context, rows=padded)
