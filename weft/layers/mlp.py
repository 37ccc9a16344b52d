"""Dense MLPs: SwiGLU and GEGLU (arXiv 2002.05202), and squared ReLU without a gate (arXiv 2109.08668).

Job: ``down(silu(gate(x)) * up(x))`` with gate and up merged, or ``down(relu(up(x)) ** 2)``. Owns: the projections. Does
not know: experts.
"""

import torch
from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, in_turn, whole
from weft.ops.activation import gelu_mul, silu_and_mul

_GATED = ("silu", "gelu", "gelu_pytorch_tanh")


class MLP(nn.Module):
    """``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum.

    Args:
        activation: the activation of the gate, ``silu``, ``gelu`` or ``gelu_pytorch_tanh``.
        gate_multiplier, down_multiplier: factors of the gate before the activation, and of the output (Falcon-H1).
        limit: see ``Multipliers.swiglu_limit``.

    Attributes:
        is_plain_swiglu: SwiGLU without biases and multipliers.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        context: ModelContext,
        *,
        bias: bool = False,
        activation: str = "silu",
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        if activation not in _GATED:
            raise ValueError(f"activation={activation!r} is not one of {', '.join(_GATED)}")
        self._backend, self._silu, self._tanh = context.backend, activation == "silu", activation != "gelu"
        self._gate_multiplier, self._down_multiplier = gate_multiplier, down_multiplier
        self._limit = limit
        scaled = bias or limit is not None or not gate_multiplier == down_multiplier == 1.0
        self.is_plain_swiglu = self._silu and not scaled
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=bias, context=context, what="intermediate_size"
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, context=context, what="intermediate_size"
        )

    @property
    def output_projection(self) -> RowParallelLinear | None:
        """Return the linear layer that produces this layer's output; None if its output is scaled."""
        return self.down_proj if self._down_multiplier == 1.0 else None

    def forward(self, x: Tensor) -> Tensor:
        if not self._silu:
            out = self.geglu(self.gate_up_proj(x))
        elif self._limit is not None:
            out = self.down_proj(silu_and_mul(self.gate_up_proj(x), limit=self._limit, backend=self._backend))
        elif self._gate_multiplier == 1.0:
            out = self.down_proj(self.gate_up_proj.silu_mul(x))
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            scaled = torch.cat([gate * self._gate_multiplier, up], dim=-1)
            out = self.down_proj(silu_and_mul(scaled, backend=self._backend))
        return out if self._down_multiplier == 1.0 else out * self._down_multiplier

    def geglu(self, projected: Tensor) -> Tensor:
        """``down(gelu(gate) * up)``: ``[T, gate | up] -> [T, hidden_size]``, this rank's part of the sum."""
        gate, up = projected.chunk(2, dim=-1)
        scaled = gate * self._gate_multiplier
        return self.down_proj(gelu_mul(scaled, up, tanh=self._tanh, backend=self._backend))


class InTurnLinear(MergedColumnParallelLinear):
    """Gate and up of one input. A checkpoint may hold them as ``w13``, a row of each in turn."""

    def layouts(self) -> tuple[WeightLayout, ...]:
        both = super().layouts()
        plain = [layout for layout in both if layout.keys() == {"0.weight", "1.weight"}]
        return (*both, *({"w13.weight": in_turn([layout["0.weight"], layout["1.weight"]])} for layout in plain))


class ScaledMLP(MLP, WeightModule):
    """SwiGLU with a learned factor of its output (Inkling)."""

    output_projection = None

    def __init__(self, hidden_size: int, intermediate_size: int, context: ModelContext) -> None:
        super().__init__(hidden_size, intermediate_size, context)
        self.gate_up_proj = InTurnLinear(
            hidden_size, [intermediate_size] * 2, bias=False, context=context, what="intermediate_size"
        )
        self.global_scale = empty_parameter(1, dtype=torch.float32, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return (out * self.global_scale).to(out.dtype)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"global_scale": whole(self.global_scale)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


class UngatedMLP(nn.Module):
    """``down(relu(up(x)) ** 2)``: ``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum."""

    def __init__(self, hidden_size: int, intermediate_size: int, context: ModelContext, *, bias: bool = False) -> None:
        super().__init__()
        what = "intermediate_size"
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias=bias, context=context, what=what)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, context=context, what=what)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu().square())


def dense_mlp(config: ModelConfig, intermediate_size: int, context: ModelContext) -> nn.Module:
    """The model's kind of MLP, so wide."""
    hidden_size, bias = config.hidden_size, config.mlp_bias
    if config.activation == "relu2":
        return UngatedMLP(hidden_size, intermediate_size, context, bias=bias)
    if config.multipliers.learned_mlp:
        return ScaledMLP(hidden_size, intermediate_size, context)
    gate, down = config.multipliers.gate, config.multipliers.down
    return MLP(
        hidden_size,
        intermediate_size,
        context,
        bias=bias,
        activation=config.activation,
        gate_multiplier=gate,
        down_multiplier=down,
        limit=config.multipliers.swiglu_limit,
    )
