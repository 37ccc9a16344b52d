"""Mixture of experts with an optional shared expert (Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE).

Job: route each token to its experts, run them, add the gated shared expert, reduce once over the ranks. Owns: the
experts' weights, fused over experts and sharded by expert width. Does not know: which layers are sparse.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.forward_context import get_forward_context
from weft.layers.context import ModelContext
from weft.layers.linear import MergedReplicatedLinear
from weft.layers.mlp import MLP
from weft.layers.weight import Layout, WeightModule, WeightPiece, empty_parameter
from weft.ops.moe import fused_moe, topk_router
from weft.parallel.sharding import divide

_ALL = slice(None)


class Experts(WeightModule):
    """Weights of all experts: ``gate_up [E, 2 * I / tp, H]`` (gate rows, then up rows) and ``down [E, H, I / tp]``."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, context: ModelContext) -> None:
        super().__init__()
        self._intermediate_size, self._rank = intermediate_size, context.tp.rank
        local = divide(intermediate_size, context.tp.size, "moe_intermediate_size")
        self.gate_up = empty_parameter(num_experts, 2 * local, hidden_size, dtype=context.dtype, device=context.device)
        self.down = empty_parameter(num_experts, hidden_size, local, dtype=context.dtype, device=context.device)

    def layouts(self) -> tuple[Layout, ...]:
        """One by one (``7.gate_proj.weight``), or fused over experts (``gate_up_proj``, ``down_proj``)."""
        return self._one_by_one(), self._fused()

    def _one_by_one(self) -> Layout:
        size = self._intermediate_size
        _, hidden_size, local = self.down.shape
        share = slice(self._rank * local, (self._rank + 1) * local)
        layout: Layout = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            layout[f"{expert}.gate_proj.weight"] = WeightPiece((size, hidden_size), (((share,), gate_up[:local]),))
            layout[f"{expert}.up_proj.weight"] = WeightPiece((size, hidden_size), (((share,), gate_up[local:]),))
            layout[f"{expert}.down_proj.weight"] = WeightPiece((hidden_size, size), (((_ALL, share), down),))
        return layout

    def _fused(self) -> Layout:
        size = self._intermediate_size
        num_experts, hidden_size, local = self.down.shape
        start, end = self._rank * local, (self._rank + 1) * local
        gate_up = (
            ((_ALL, slice(start, end)), self.gate_up[:, :local]),
            ((_ALL, slice(size + start, size + end)), self.gate_up[:, local:]),
        )
        down = (((_ALL, _ALL, slice(start, end)), self.down),)
        return {
            "gate_up_proj": WeightPiece((num_experts, 2 * size, hidden_size), gate_up),
            "down_proj": WeightPiece((num_experts, hidden_size, size), down),
        }


class SparseMoe(nn.Module):
    """``[T, hidden_size] -> [T, hidden_size]``. Padding rows meet no routed expert.

    The router's rows and the shared expert's gate are one small matrix, so that both come from one product.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a sparse layer needs the model config's moe"
        self._backend, self._tp = context.backend, context.tp
        self._num_experts, self._top_k = moe.num_experts, moe.num_experts_per_tok
        self._renormalize = moe.norm_topk_prob
        shared_size = moe.shared_expert_intermediate_size
        outputs = [moe.num_experts] if shared_size is None else [moe.num_experts, 1]
        self.router = MergedReplicatedLinear(config.hidden_size, outputs, context=context)
        self.experts = Experts(moe.num_experts, config.hidden_size, moe.intermediate_size, context)
        self.shared_expert = None
        if shared_size is not None:
            self.shared_expert = MLP(config.hidden_size, shared_size, context, reduce=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        batch = get_forward_context().batch
        weights, ids = topk_router(
            logits[:, : self._num_experts],
            self._top_k,
            renormalize=self._renormalize,
            num_tokens=batch.num_tokens if batch.token_count is None else batch.token_count,
            backend=self._backend,
        )
        gate = logits[:, self._num_experts : self._num_experts + 1]
        out = fused_moe(
            x,
            self.experts.gate_up,
            self.experts.down,
            weights,
            ids,
            shared=self.shared_expert(x) if self.shared_expert is not None else None,
            shared_gate=gate if self.shared_expert is not None else None,
            backend=self._backend,
        )
        return self._tp.all_reduce(out)
