"""The dense MLP (SwiGLU, arXiv 2002.05202).

Job: ``down(silu(gate(x)) * up(x))`` with gate and up merged. Owns: its projections. Does not know: experts.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.layers.context import ModelContext
from weft.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum."""

    def __init__(self, hidden_size: int, intermediate_size: int, context: ModelContext, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=bias, context=context, what="intermediate_size"
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, context=context, what="intermediate_size"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj.silu_mul(x))
