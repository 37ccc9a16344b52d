"""Linear layers, sharded over the tensor-parallel group (Megatron-LM, arXiv 1909.08053).

Job: ``y = x W^T + b`` with W's rows (column parallel: outputs are split) or columns (row parallel: inputs are split)
on different ranks, and projections of the same input merged into one matrix. Owns: weights and the rows they come from.
Does not know: what the outputs mean beyond heads and parts, or checkpoint names.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from weft.layers.context import ModelContext
from weft.layers.weight import Layout, RowMap, RowRun, WeightModule, WeightPiece, empty_parameter, whole
from weft.ops.linear import linear
from weft.parallel.sharding import divide, head_range


class ColumnParallelLinear(WeightModule):
    """Outputs split over ranks: ``[..., in_features] -> [..., out_features / tp]``. Subclasses merge several parts."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, context: ModelContext, what: str = "out_features"
    ) -> None:
        local = divide(out_features, context.tp.size, what)
        rows = RowMap(out_features, (RowRun(context.tp.rank * local, 0, local),))
        self._build(in_features, local, {"": rows}, bias, context)

    def _build(self, in_features: int, rows: int, parts: dict[str, RowMap], bias: bool, context: ModelContext) -> None:
        """Allocate ``rows`` local rows; ``parts`` maps the prefix of each part's tensors to its rows."""
        super().__init__()
        self._parts, self._backend = parts, context.backend
        self.weight = empty_parameter(rows, in_features, dtype=context.dtype, device=context.device)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(rows, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, backend=self._backend)

    def layouts(self) -> tuple[Layout, ...]:
        layout = {f"{prefix}weight": rows.piece(self.weight) for prefix, rows in self._parts.items()}
        if self.bias is not None:
            layout |= {f"{prefix}bias": rows.piece(self.bias) for prefix, rows in self._parts.items()}
        return (layout,)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel projections of one input in one matrix; the outputs stand side by side.

    Args:
        out_features: outputs of each part; every one is split over the ranks.
    """

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, context: ModelContext, what: str
    ) -> None:
        parts, target = {}, 0
        for i, total in enumerate(out_features):
            local = divide(total, context.tp.size, what)
            parts[f"{i}."] = RowMap(total, (RowRun(context.tp.rank * local, target, local),))
            target += local
        self._build(in_features, target, parts, bias, context)


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values (and the output gate, if any) of the rank's heads from one matrix.

    The output is ``[..., q | gate | k | v]``. In the checkpoint a gated ``q_proj`` holds each head's query rows
    followed by its gate rows; they are separated when the weights are loaded. KV heads are replicated if there
    are fewer than ranks.

    Attributes:
        num_heads, num_kv_heads: heads on this rank.
        split_sizes: widths of the output's parts, in order.
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
        sizes = [width, width, kv_width, kv_width] if gate else [width, kv_width, kv_width]
        parts = {
            "0.": _query_rows(heads, num_heads, head_dim, gate),
            "1.": RowMap(num_kv_heads * head_dim, (RowRun(kv_heads.start * head_dim, sum(sizes[:-2]), kv_width),)),
            "2.": RowMap(num_kv_heads * head_dim, (RowRun(kv_heads.start * head_dim, sum(sizes[:-1]), kv_width),)),
        }
        self._build(hidden_size, sum(sizes), parts, bias, context)
        self.num_heads, self.num_kv_heads, self.split_sizes = len(heads), len(kv_heads), sizes


def _query_rows(heads: range, num_heads: int, head_dim: int, gate: bool) -> RowMap:
    if not gate:
        return RowMap(num_heads * head_dim, (RowRun(heads.start * head_dim, 0, len(heads) * head_dim),))
    runs = []
    for local, head in enumerate(heads):
        source, target = 2 * head * head_dim, local * head_dim
        runs.append(RowRun(source, target, head_dim))
        runs.append(RowRun(source + head_dim, len(heads) * head_dim + target, head_dim))
    return RowMap(2 * num_heads * head_dim, tuple(runs))


class RowParallelLinear(WeightModule):
    """Inputs split over ranks: ``[..., in_features / tp] -> [..., out_features]``, summed over the ranks.

    Args:
        reduce: False leaves the partial sum to the caller, who adds several and reduces once (then without bias).
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, context: ModelContext, what: str, reduce: bool = True
    ) -> None:
        super().__init__()
        assert reduce or not bias, "a bias must be added after the reduction"
        self._tp, self._reduce, self._backend = context.tp, reduce, context.backend
        self._in_features = in_features
        local = divide(in_features, context.tp.size, what)
        self.weight = empty_parameter(out_features, local, dtype=context.dtype, device=context.device)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(out_features, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        if self._tp.size == 1:
            return linear(x, self.weight, self.bias, backend=self._backend)
        y = linear(x, self.weight, backend=self._backend)
        if not self._reduce:
            return y
        y = self._tp.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def layouts(self) -> tuple[Layout, ...]:
        out_features, local = self.weight.shape
        columns = slice(self._tp.rank * local, (self._tp.rank + 1) * local)
        layout = {"weight": WeightPiece((out_features, self._in_features), (((slice(None), columns), self.weight),))}
        if self.bias is not None:
            layout["bias"] = whole(self.bias)
        return (layout,)


class MergedReplicatedLinear(ColumnParallelLinear):
    """Several small projections of one input in one matrix that every rank holds whole (routers).

    The output has zero columns at its end up to a multiple of 8: for rows that are not aligned to 16 bytes the matrix
    library falls back to a kernel that loads element by element (seen in a profile with 513 columns on an H200).
    """

    ALIGNMENT = 8

    def __init__(self, in_features: int, out_features: Sequence[int], *, context: ModelContext) -> None:
        parts, target = {}, 0
        for i, total in enumerate(out_features):
            parts[f"{i}."] = RowMap(total, (RowRun(0, target, total),))
            target += total
        padded = -(-target // self.ALIGNMENT) * self.ALIGNMENT
        self._build(in_features, padded, parts, False, context)
        self.num_outputs = target
        self.zero_padding()

    def zero_padding(self) -> None:
        """Zero the rows that no checkpoint fills."""
        self.weight[self.num_outputs :].zero_()
