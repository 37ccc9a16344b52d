"""Weights in the model's dtype."""

from typing import Any, Protocol

from torch import Tensor

from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, LinearMethod
from weft.layers.moe import Experts, ExpertsMethod
from weft.layers.weight import CopyTarget, Interleaved, RowRun, WeightLayout, WeightPiece, empty_parameter
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.linear import invariant_linear_parts, linear, linear_parts, linear_silu_mul
from weft.ops.moe import Routed, fused_moe


class UnquantizedLinear(LinearMethod):
    """A matrix ``weight [N, K]``."""

    def __init__(self, context: ModelContext) -> None:
        self._context = context

    def create(self, layer: LinearBase) -> None:
        shard = layer.shard
        layer.weight = empty_parameter(
            shard.rows,
            shard.columns,
            dtype=self._context.dtype,
            device=self._context.device,
            place=layer.places.get("weight"),
        )
        layer.weight[shard.num_filled :].zero_()

    def layouts(self, layer: LinearBase) -> tuple[WeightLayout, ...]:
        weight = layer.get_parameter("weight")
        return ({f"{part}weight": layer.shard.piece(rows, weight) for part, rows in layer.shard.parts.items()},)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias, backend=self._context.backend)

    def apply_partial_sums(self, layer: LinearBase, x: Tensor, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        backend = self._context.backend
        if backend.is_invariant:
            return invariant_linear_parts(x, layer.weight, backend=backend)
        return linear_parts(x, layer.weight, peers, backend=backend)

    def apply_silu_mul(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear_silu_mul(x, layer.weight, bias, backend=self._context.backend)


class UnquantizedExperts(ExpertsMethod):
    """Experts with ``gate_up [E, 2 * I, H]`` and ``down [E, H, I]``."""

    def __init__(self, context: ModelContext) -> None:
        self._context = context

    def create(self, layer: Experts) -> None:
        for name, shard in (("gate_up", layer.gate_up_shard), ("down", layer.down_shard)):
            layer.allocate(name, "weight", (shard.rows, shard.columns), self._context.dtype, self._context.device)

    def layouts(self, layer: Experts) -> tuple[WeightLayout, ...]:
        """Tensors of single experts (``7.gate_proj.weight``), or fused over experts (``gate_up_proj``,
        ``down_proj``)."""
        gate_up, down = layer.get_parameter("gate_up"), layer.get_parameter("down")
        if layer.interleaved:
            gate, up = gate_up.transpose(1, 2).chunk(2, dim=2)
            return (interleaved_layout(layer, gate, up, down.transpose(1, 2)),)
        one_by_one: WeightLayout = {}
        for shard, parameter in ((layer.gate_up_shard, gate_up), (layer.down_shard, down)):
            for part, rows in shard.parts.items():
                for expert in range(layer.num_experts):  # the checkpoint also has the experts of other ranks
                    one_by_one[f"{expert}.{part}weight"] = WeightPiece((rows.total, shard.total_columns), ())
                for expert, matrix in zip(layer.local_experts, parameter, strict=True):
                    one_by_one[f"{expert}.{part}weight"] = shard.piece(rows, matrix)
        return one_by_one, fused_layout(layer, gate_up, down)

    def apply(self, experts: Experts, x: Tensor, routed: Routed, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        matrices = experts.matrices(routed.shared is None)
        gate_up, down, extras = matrices["gate_up"], matrices["down"], experts.extras
        if peers is not None:
            from weft.ops.moe.combine import send_experts
            from weft.ops.moe.experts import pair_outputs

            return send_experts(pair_outputs(x, gate_up, down, routed.ids, extras), routed, peers)
        (weights, ids, shared, gate), backend = routed, self._context.backend
        return fused_moe(
            x, gate_up, down, weights, ids, extras=extras, shared=shared, shared_gate=gate, backend=backend
        )


def interleaved_layout(layer: Experts, gate: CopyTarget, up: CopyTarget, down: CopyTarget) -> WeightLayout:
    """The layout of gpt-oss: ``gate_up_proj [E, H, 2 * I]``, gate and up columns in turn, and ``down_proj [E, I,
    H]``. The targets receive ``[E, H, I]`` and ``[E, I, H]``."""
    shard, experts = layer.down_shard, slice(layer.local_experts.start, layer.local_experts.stop)
    first, last, total = shard.first_column, shard.first_column + shard.columns, shard.total_columns
    return {
        "gate_up_proj": WeightPiece(
            (layer.num_experts, shard.rows, 2 * total),
            (((experts, slice(None), slice(2 * first, 2 * last)), Interleaved(gate, up)),),
        ),
        "down_proj": WeightPiece((layer.num_experts, total, shard.rows), (((experts, slice(first, last)), down),)),
    }


class IndexableTarget(Protocol):
    """A tensor ``[E, rows, columns]``, or an object that is indexed like one."""

    def __getitem__(self, index: Any, /) -> CopyTarget: ...


def fused_layout(layer: Experts, gate_up: IndexableTarget, down: IndexableTarget) -> WeightLayout:
    """Fused tensors of all experts: ``gate_up_proj [E, 2 * I, H]`` (gate rows, then up rows) and ``down_proj [E, H,
    I]``."""
    layout: WeightLayout = {}
    experts = slice(layer.local_experts.start, layer.local_experts.stop)
    for name, shard, parameter in (
        ("gate_up_proj", layer.gate_up_shard, gate_up),
        ("down_proj", layer.down_shard, down),
    ):
        columns = shard.source_columns
        runs: list[RowRun] = []
        total = 0
        for rows in shard.parts.values():
            runs += [RowRun(total + run.source, run.target, run.count) for run in rows.runs]
            total += rows.total
        if isinstance(parameter, Tensor):  # converters need the parts
            runs = _joined(runs)
        copies = tuple(((experts, run.source_rows, columns), parameter[:, run.target_rows]) for run in runs)
        layout[name] = WeightPiece((layer.num_experts, total, shard.total_columns), copies, transposable=True)
    return layout


def _joined(runs: list[RowRun]) -> list[RowRun]:
    """Merge consecutive runs. Copies of contiguous memory are faster than copies of rows."""
    joined = runs[:1]
    for run in runs[1:]:
        last = joined[-1]
        if (run.source, run.target) == (last.source + last.count, last.target + last.count):
            joined[-1] = RowRun(last.source, last.target, last.count + run.count)
        else:
            joined.append(run)
    return joined
