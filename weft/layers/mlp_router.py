"""An MLP that chooses experts, with a state that the router of the next layer reads (ZAYA1).

Job: the classes' logits. Owns: the MLP's weights, whole on every rank and never quantised. Does not know: experts.
"""

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.linear import MergedReplicatedLinear
from weft.layers.norm import RMSNorm
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, whole
from weft.ops.activation import gelu


class MlpRouter(nn.Module):
    """``x [T, hidden_size]``, ``carried [T, R]`` or None -> logits ``[T, classes]`` and the state ``[T, R]``."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None and moe.router_size is not None
        size = self._size = moe.router_size
        self._backend = context.backend
        self._num_classes = moe.num_classes
        self.down_proj = MergedReplicatedLinear(config.hidden_size, [size], bias=True, context=context)
        self.router_norm = RMSNorm(size, config.rms_norm_eps, context, zero_centered=False)
        self.fc1, self.fc2 = (MergedReplicatedLinear(size, [size], bias=True, context=context) for _ in range(2))
        self.out_proj = MergedReplicatedLinear(size, [moe.num_classes], context=context)

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        state = self.down_proj(x)[:, : self._size]
        if carried is not None:
            state = state + carried
        hidden = self.router_norm(state)
        for linear in (self.fc1, self.fc2):
            hidden = gelu(linear(hidden)[:, : self._size], backend=self._backend)
        return self.out_proj(hidden)[:, : self._num_classes], state


class RouterCarry(WeightModule):
    """The state of the previous layer's router, as a layer's router adds it: ``[T, R] -> [T, R]``."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self.router_states_scale = empty_parameter(size, dtype=context.dtype, device=context.device)

    def forward(self, state: Tensor) -> Tensor:
        return state * self.router_states_scale

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"router_states_scale": whole(self.router_states_scale)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1
