"""Mixture of experts with an optional shared expert (arXiv 1701.06538, 2401.06066).

Job: route each token to its experts, run them, add the shared expert. Owns: how the experts are
sharded, by their width or one by one. Does not know: which layers are sparse, how weights are stored
(``quant_method``).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import ClassVar

import torch
from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.config.moe import MoeConfig
from weft.config.sharding import divide
from weft.forward_context import get_forward_context, serves_any_num_tokens
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, MergedReplicatedLinear, PackedLinear
from weft.layers.mlp import MLP, dense_mlp
from weft.layers.mlp_router import MlpRouter
from weft.layers.quant_method import QuantMethod
from weft.layers.weight import (
    Interleaved,
    MatrixShard,
    RowMap,
    RowRun,
    WeightLayout,
    WeightModule,
    WeightPiece,
    empty_parameter,
    whole,
    whole_rows,
)
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.moe import SOFTMAX, ExpertExtras, Routed, RoutingRule, topk_router


class Experts(WeightModule):
    """The experts of a layer: ``gate_up [E, 2 * I / tp, H]`` (gate rows, then up rows) and ``down [E, H, I / tp]``.

    With expert parallelism the shapes are ``[E / tp, 2 * I, H]`` and ``[E / tp, H, I]``. Without a gate, ``gate_up``
    has half of the rows: up alone.

    Attributes:
        num_experts: experts of the layer, over all ranks.
        local_experts: which of them this rank holds, or holds a share of.
        gate_up_shard, down_shard: which rows and columns of one expert this rank holds.
        interleaved: see ``MoeConfig``.
        activation: the numbers of an activation that is not the model's, as in ``ExpertExtras``; else empty.
        shared_linears: ``gate_up`` and ``down`` of a shared expert with matrices of the same shape as the others', or
            None.
        shared_joins: True if the shared expert's matrices follow the others in memory, so that an id selects it.
        joined: what ``allocate`` made, by parameter: all experts' matrices or scales, the shared one's included.
        gate_up_bias, down_bias: ``[E, 2 * I / tp]`` and ``[E, H]``, or None. Where ranks hold a share of every expert,
            the first alone has ``down_bias``.
    """

    quant_method: ExpertsMethod

    def __init__(self, moe: MoeConfig, hidden_size: int, context: ModelContext, *, gated: bool) -> None:
        super().__init__()
        num_experts, intermediate_size = moe.num_experts, moe.intermediate_size
        self.gated, self.interleaved, self.biases = gated, moe.interleaved, moe.biases
        activation = moe.clamped or moe.softcapped
        self.activation: dict[str, float] = {} if activation is None else asdict(activation)
        self.num_experts, self.local_experts = num_experts, range(num_experts)
        rank, local = context.tp.rank, intermediate_size
        if context.expert_parallel:
            count = divide(num_experts, context.tp.size, "num_experts")
            self.local_experts, rank = range(rank * count, (rank + 1) * count), 0
        else:
            local = divide(intermediate_size, context.tp.size, "moe_intermediate_size")
        names = ("gate_proj.", "up_proj.") if gated else ("up_proj.",)
        parts = {
            name: RowMap(intermediate_size, (RowRun(rank * local, i * local, local),)) for i, name in enumerate(names)
        }
        self.gate_up_shard = MatrixShard(len(names) * local, hidden_size, parts, 0, hidden_size)
        down = RowMap(hidden_size, (RowRun(0, 0, hidden_size),))
        self.down_shard = MatrixShard(hidden_size, local, {"down_proj.": down}, rank * local, intermediate_size)
        self.shared_linears: dict[str, LinearBase] | None = None
        self.shared_joins = False
        self.joined: dict[str, Tensor] = {}
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if moe.biases:
            count = len(self.local_experts)
            self.gate_up_bias = empty_parameter(
                count, self.gate_up_shard.rows, dtype=context.dtype, device=context.device
            )
            if rank == 0:
                self.down_bias = empty_parameter(count, hidden_size, dtype=context.dtype, device=context.device)

    def allocate(
        self, matrix: str, part: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate ``weight`` or ``weight_scale`` of ``gate_up`` or ``down``, ``[E, *shape]``, as parameter ``gate_up``
        or ``gate_up_scale`` and so on; if the shared expert joins, with a place for it after the others."""
        count, name = len(self.local_experts), f"{matrix}{part.removeprefix('weight')}"
        joined = torch.empty((count + self.shared_joins, *shape), dtype=dtype, device=device)
        self.register_parameter(name, nn.Parameter(joined[:count], requires_grad=False))
        self.joined[name] = joined
        if self.shared_joins:
            assert self.shared_linears is not None
            self.shared_linears[matrix].places[part] = joined[count]

    def matrices(self, shared: bool) -> dict[str, Tensor]:
        """Return the matrices that ``allocate`` made, by name; with ``shared``, including the shared expert's."""
        return self.joined if shared else {name: self.get_parameter(name) for name in self.joined}

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
        peers: PeerBuffers | None = None,
    ) -> Tensor | SentRows:
        """Run ``weft.ops.moe.fused_moe``: ``[T, H] -> [T, H]``. With ``peers``, see ``ExpertsMethod.apply``.

        Ids count from the first local expert.
        """
        return self.quant_method.apply(self, x, Routed(weights, ids, shared, shared_gate), peers)

    @property
    def extras(self) -> ExpertExtras:
        """The biases and the activation, for ``weft.ops.moe.fused_moe``."""
        return ExpertExtras(self.gate_up_bias, self.down_bias, **self.activation)

    def layouts(self) -> tuple[WeightLayout, ...]:
        biases = self._bias_layout() if self.biases else {}
        return tuple(layout | biases for layout in self.quant_method.layouts(self))

    def _bias_layout(self) -> WeightLayout:
        """``gate_up_proj_bias [E, 2 * I]``, gate and up in turn, and ``down_proj_bias [E, H]`` (gpt-oss)."""
        assert self.gate_up_bias is not None
        experts = slice(self.local_experts.start, self.local_experts.stop)
        rows = slice(2 * self.down_shard.first_column, 2 * (self.down_shard.first_column + self.down_shard.columns))
        both = Interleaved(*self.gate_up_bias.chunk(2, dim=1))
        down = () if self.down_bias is None else (((experts, slice(None)), self.down_bias),)
        return {
            "gate_up_proj_bias": WeightPiece(
                (self.num_experts, 2 * self.down_shard.total_columns), (((experts, rows), both),)
            ),
            "down_proj_bias": WeightPiece((self.num_experts, self.down_shard.rows), down),
        }

    def initial_range(self, name: str) -> tuple[float, float]:
        if name.endswith("_bias"):
            return super().initial_range(name)
        return self.quant_method.initial_range(self, name)


MOST_ROUTED_ROWS = 256
"""Rows up to which a shared expert is computed as one of each token's experts: two launches fewer. Beyond them its
products are large enough for the matrix library."""

_NARROW, _MOST_ROUTED_ROWS_OF_NARROW = 256, 2048
"""Columns of narrow experts of two bytes, and the rows up to which a narrow shared expert is routed.

A pass of 512 to 2,048 rows takes 2 to 3% less with a quarter of Qwen3-Next's experts on a rank, and 1.5% less with
half of them. More rows were not measured.
"""


class ExpertsMethod(QuantMethod[Experts]):
    """The merged gate and up projections of all experts, and their down projections."""

    @abstractmethod
    def apply(self, experts: Experts, x: Tensor, routed: Routed, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        """Return the weighted sum of the routed experts, as ``weft.ops.moe.fused_moe``: ``[T, H] -> [T, H]``.

        An id may select the shared expert only if ``experts.shared_joins``. With ``peers``, the sums are a rank's parts
        of what ``all_reduce_rms_norm`` forms next, and are sent there.
        """


def most_routed_rows(experts: Experts) -> int:
    """``MOST_ROUTED_ROWS``, or more for narrow experts."""
    is_narrow = experts.down_shard.columns <= _NARROW and experts.joined["gate_up"].element_size() > 1
    return _MOST_ROUTED_ROWS_OF_NARROW if is_narrow else MOST_ROUTED_ROWS


class SparseMoe(WeightModule):
    """``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum. Padding rows have no routed expert.

    The router and the shared expert's gate share one small matrix, and so one product.
    """

    _all_reduce: AllReduce | None = None
    _experts: ClassVar[type[Experts]] = Experts

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a sparse layer needs the model config's moe"
        self._moe, self._backend = moe, context.backend
        shared_size = moe.shared_expert_intermediate_size
        self._shared_gate = shared_size is not None and moe.shared_expert_gate
        outputs = [moe.num_experts, 1] if self._shared_gate else [moe.num_experts]
        self.router: nn.Module = MergedReplicatedLinear(config.hidden_size, outputs, bias=moe.biases, context=context)
        self.correction_bias: nn.Parameter | None = None
        if moe.has_correction_bias:
            count = moe.num_classes - moe.num_always
            self.correction_bias = empty_parameter(count, dtype=torch.float32, device=context.device)
        width = moe.latent_size or config.hidden_size
        self.experts = self._experts(moe, width, context, gated=config.activation == "silu")
        self.shared_expert = None
        if shared_size is not None:
            self.shared_expert = dense_mlp(config, shared_size, context)
            self.experts.shared_linears = _as_one_expert(self.shared_expert, self.experts)

    def return_partial_sums(self, all_reduce: AllReduce | None) -> None:
        """Return partial sums and let the following ``ResidualRMSNorm`` add them. ``all_reduce`` is the norm's."""
        self._all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor | SentRows:
        logits = self.router(x)
        gate = logits[:, self._moe.num_experts : self._moe.num_experts + 1] if self._shared_gate else None
        logits = logits[:, : self._moe.num_experts]
        if self.shared_expert is None or self._shared_is_routed(x):
            peers = None if self._all_reduce is None else self._all_reduce.peers_to_send(x)
            return self.experts(x, *self._route(logits, self.shared_expert is not None, gate), peers=peers)
        return self.experts(x, *self._route(logits, False, None), shared=self.shared_expert(x), shared_gate=gate)

    def _shared_is_routed(self, x: Tensor) -> bool:
        """Return True if the shared expert is one of each token's experts, which is faster for few rows."""
        if not self.experts.shared_joins or self._backend.is_invariant or serves_any_num_tokens():
            return self.experts.shared_joins and self._backend.is_invariant
        return x.shape[0] <= most_routed_rows(self.experts)

    def _route(self, logits: Tensor, shared: bool, shared_gate: Tensor | None) -> tuple[Tensor, Tensor]:
        """``[T, E]`` -> the weights and local ids of each token's experts, ``[T, top_k]``, and of the shared one after
        them."""
        moe, batch, local = self._moe, get_forward_context().batch, self.experts.local_experts
        num_tokens = batch.num_tokens if batch.token_count is None else batch.token_count
        rule = SOFTMAX._replace(bias=self.correction_bias)
        if (sigmoid := moe.sigmoid) is not None:
            groups = sigmoid.num_groups, sigmoid.top_groups
            rule = RoutingRule(True, self.correction_bias, sigmoid.epsilon, sigmoid.scale, *groups, moe.num_always)
        return topk_router(
            logits,
            moe.num_experts_per_tok - moe.num_always,
            renormalize=moe.norm_topk_prob,
            num_tokens=num_tokens,
            first_expert=local.start,
            num_experts=len(local),
            shared_expert=shared,
            shared_gate=shared_gate,
            rule=rule,
            backend=self._backend,
        )

    def layouts(self) -> tuple[WeightLayout, ...]:
        """The correction bias stands in the block (LFM2) or in the router (DeepSeek-V3)."""
        if self.correction_bias is None:
            return ({},)
        piece = whole(self.correction_bias)
        return {"expert_bias": piece}, {"gate.e_score_correction_bias": piece}

    def initial_range(self, name: str) -> tuple[float, float]:
        """Biases that change some choices: scores lie between 0 and 1."""
        return -0.1, 0.1


class MlpRoutedMoe(SparseMoe):
    """Experts that an MLP chooses. A class after the experts stands for no expert."""

    router: MlpRouter

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.router = MlpRouter(config, context)

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """``[T, hidden_size]``, ``[T, R]`` -> this rank's part of the sum, and the router's state ``[T, R]``."""
        logits, state = self.router(x, carried)
        return self.experts(x, *self._route(logits, False, None)), state

    def layouts(self) -> tuple[WeightLayout, ...]:
        assert self.correction_bias is not None
        return ({"gate.balancing_biases": whole(self.correction_bias)},)


class LatentMoe(SparseMoe):
    """Routed experts between two projections, into a smaller space and back (Nemotron-H). The router and the shared
    expert read the model's own vectors. Both projections are whole on every rank, so the result is this rank's part of
    the sum."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        assert self._moe.latent_size is not None
        sizes = config.hidden_size, self._moe.latent_size
        self.latent_in, self.latent_out = (
            PackedLinear(columns, {"": whole_rows(rows)}, bias=False, context=context)
            for columns, rows in (sizes, sizes[::-1])
        )

    def forward(self, x: Tensor) -> Tensor:
        routes = self._route(self.router(x)[:, : self._moe.num_experts], False, None)
        out = self.latent_out(self.experts(self.latent_in(x), *routes))
        return out if self.shared_expert is None else out + self.shared_expert(x)


def _as_one_expert(shared: nn.Module, experts: Experts) -> dict[str, LinearBase] | None:
    """The linear layers of a shared expert that computes what an expert does, with matrices of the same shape."""
    if not isinstance(shared, MLP) or not shared.is_plain_swiglu or experts.biases or experts.activation:
        return None
    linears: dict[str, LinearBase] = {"gate_up": shared.gate_up_proj, "down": shared.down_proj}
    shards = {"gate_up": experts.gate_up_shard, "down": experts.down_shard}
    same = all(
        (linear.shard.rows, linear.shard.columns) == (shards[n].rows, shards[n].columns)
        for n, linear in linears.items()
    )
    return linears if same else None
