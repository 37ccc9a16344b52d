"""Mixture of experts with an optional shared expert (Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE).

Job: route each token to its experts, run them, add the gated shared expert. Owns: how the experts are
sharded, by their width or one by one. Does not know: which layers are sparse, how weights are stored
(``quant_method``).
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import get_forward_context
from weft.layers.context import ModelContext
from weft.layers.linear import MergedReplicatedLinear
from weft.layers.mlp import MLP
from weft.layers.quant_method import ExpertsMethod
from weft.layers.weight import Layout, MatrixShard, RowMap, RowRun, WeightModule
from weft.ops.moe import topk_router


class Experts(WeightModule):
    """The experts of a layer: ``gate_up [E, 2 * I / tp, H]`` (gate rows, then up rows) and ``down [E, H, I / tp]``.
    With expert parallelism ``[E / tp, 2 * I, H]`` and ``[E / tp, H, I]``.

    Attributes:
        num_experts: experts of the layer, over all ranks.
        local_experts: which of them this rank holds, or holds a share of.
        gate_up_shard, down_shard: which rows and columns of one expert this rank holds.
    """

    quant_method: ExpertsMethod

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, context: ModelContext) -> None:
        super().__init__()
        self.num_experts, self.local_experts = num_experts, range(num_experts)
        rank, local = context.tp.rank, intermediate_size
        if context.expert_parallel:
            count = divide(num_experts, context.tp.size, "num_experts")
            self.local_experts, rank = range(rank * count, (rank + 1) * count), 0
        else:
            local = divide(intermediate_size, context.tp.size, "moe_intermediate_size")
        gate = RowMap(intermediate_size, (RowRun(rank * local, 0, local),))
        up = RowMap(intermediate_size, (RowRun(rank * local, local, local),))
        self.gate_up_shard = MatrixShard(2 * local, hidden_size, {"gate_proj.": gate, "up_proj.": up}, 0, hidden_size)
        down = RowMap(hidden_size, (RowRun(0, 0, hidden_size),))
        self.down_shard = MatrixShard(hidden_size, local, {"down_proj.": down}, rank * local, intermediate_size)

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """As ``weft.ops.moe.fused_moe``: ``[T, H] -> [T, H]``; ids count from the first local expert."""
        return self.quant_method.apply(self, x, weights, ids, shared, shared_gate)

    def layouts(self) -> tuple[Layout, ...]:
        return self.quant_method.layouts(self)

    def initial_range(self, name: str) -> tuple[float, float]:
        return self.quant_method.initial_range(self, name)


class SparseMoe(nn.Module):
    """``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum. Padding rows meet no routed expert.

    The router's rows and the shared expert's gate are one small matrix, so that both come from one product.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a sparse layer needs the model config's moe"
        self._backend = context.backend
        self._num_experts, self._top_k = moe.num_experts, moe.num_experts_per_tok
        self._renormalize = moe.norm_topk_prob
        shared_size = moe.shared_expert_intermediate_size
        outputs = [moe.num_experts] if shared_size is None else [moe.num_experts, 1]
        self.router = MergedReplicatedLinear(config.hidden_size, outputs, context=context)
        self.experts = Experts(moe.num_experts, config.hidden_size, moe.intermediate_size, context)
        self.shared_expert = None
        if shared_size is not None:
            self.shared_expert = MLP(config.hidden_size, shared_size, context)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        batch = get_forward_context().batch
        weights, ids = topk_router(
            logits[:, : self._num_experts],
            self._top_k,
            renormalize=self._renormalize,
            num_tokens=batch.num_tokens if batch.token_count is None else batch.token_count,
            first_expert=self.experts.local_experts.start,
            num_experts=len(self.experts.local_experts),
            backend=self._backend,
        )
        gate = logits[:, self._num_experts : self._num_experts + 1]
        return self.experts(
            x,
            weights,
            ids,
            shared=self.shared_expert(x) if self.shared_expert is not None else None,
            shared_gate=gate if self.shared_expert is not None else None,
        )
