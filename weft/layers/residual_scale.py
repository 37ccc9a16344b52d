"""A residual stream in float32 that learned vectors scale and shift (ZAYA1).

Job: the sum after each block, the stream's beginning, and the norms that read it. Owns: these vectors, whole on every
rank. Does not know: what a block computes.
"""

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.norm import ResidualSum, RMSNorm
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, whole
from weft.ops.backend import Backend
from weft.ops.rows import by_row
from weft.ops.rows import whole as all_rows


class _Vectors(WeightModule):
    """Vectors ``[hidden_size]`` by their names in checkpoints. Names of scales end with ``scale``."""

    names: tuple[str, ...]

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self._sum, self._backend = ResidualSum(size, context, partial=True), context.backend
        for name in self.names:
            self.register_parameter(name, empty_parameter(size, dtype=context.dtype, device=context.device))

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: whole(self.get_parameter(name)) for name in self.names},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return (0.9, 1.1) if name.endswith("scale") else (-0.1, 0.1)


class InputScale(_Vectors):
    """Begins the stream: embeddings ``[T, hidden_size]``, this rank's part of the sum, to float32."""

    names = ("scale", "bias")
    scale: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return ((self._sum(x, None) + self.bias) * self.scale).float()


class ResidualScale(_Vectors):
    """Adds a block's output ``[T, hidden_size]``, this rank's part of the sum, to the stream."""

    names = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
    hidden_states_scale: Tensor
    hidden_states_bias: Tensor
    residual_scale: Tensor
    residual_bias: Tensor

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        scaled = (self._sum(x, None) + self.hidden_states_bias) * self.hidden_states_scale
        rows = by_row("scaled", "stream") if self._backend is Backend.INVARIANT_TORCH else all_rows
        stream: Tensor = rows(_add_scaled, scaled.float(), residual + self.residual_bias, self.residual_scale.float())
        return stream


def _add_scaled(scaled: Tensor, stream: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(scaled, stream, scale)


class StreamRMSNorm(RMSNorm):
    """RMSNorm of the stream: float32 ``[T, hidden_size]`` to the model's dtype."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config.hidden_size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise the stream ``residual``, which holds every block's output already."""
        return self(residual), residual
