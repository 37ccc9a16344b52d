"""Layers of vision towers: plain linear maps and layer norms, whole on every rank, in the model's dtype.

Job: hold parameters under their published names. Does not know: images, towers. A tower meets any number of patches:
what is no operation of torch is a kernel that is compiled once for all of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.layers.context import ModelContext
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, uniform_range, whole
from weft.ops.activation import silu_and_mul
from weft.ops.vision import add_layer_norm, grid_positions

ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


class VisionLinear(WeightModule):
    """``[..., in_features] -> [..., out_features]``.

    Args:
        kernel: the checkpoint's tensor has these dimensions in place of ``in_features``: a convolution whose stride is
            its kernel, on patches laid out flat.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: ModelContext,
        *,
        kernel: tuple[int, ...] = (),
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._in_features = in_features
        shape = kernel or (in_features,)
        self.weight = empty_parameter(out_features, *shape, dtype=context.dtype, device=context.device)
        self.bias = empty_parameter(out_features, dtype=context.dtype, device=context.device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.view(-1, self._in_features), self.bias)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """``forward``, and then an activation; in one product where the matrix library does both."""
        weight = self.weight.view(-1, self._in_features)
        if x.is_cuda and x.dtype.itemsize == 2 and activation == "gelu_pytorch_tanh" and self.bias is not None:
            return torch._addmm_activation(self.bias, x, weight.t(), use_gelu=True)  # on CUDA the tanh form
        return ACTIVATIONS[activation](F.linear(x, weight, self.bias))

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: whole(parameter) for name, parameter in self.named_parameters()},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return uniform_range(self._in_features)


class VisionGateUp(VisionLinear):
    """A clamped SwiGLU's gate and up projections as one product: ``[N, in_features] -> [N, inner]`` after the gate.

    Args:
        limit: see ``silu_and_mul``.
    """

    def __init__(self, in_features: int, inner: int, limit: float, context: ModelContext, *, bias: bool) -> None:
        super().__init__(in_features, 2 * inner, context, bias=bias)
        self._inner, self._limit, self._backend = inner, limit, context.backend

    def forward(self, x: Tensor) -> Tensor:
        return silu_and_mul(super().forward(x), limit=self._limit, backend=self._backend)

    def layouts(self) -> tuple[WeightLayout, ...]:
        parts = ((name, p.split(self._inner)) for name, p in self.named_parameters())
        return ({f"{i}.{name}": whole(half) for name, halves in parts for i, half in enumerate(halves)},)


class VisionLayerNorm(WeightModule):
    """Layer norm over the last dimension, with scale and shift."""

    def __init__(self, size: int, context: ModelContext, *, eps: float = 1e-6) -> None:
        super().__init__()
        self._backend, self._eps = context.backend, eps
        self.weight = empty_parameter(size, dtype=context.dtype, device=context.device)
        self.bias = empty_parameter(size, dtype=context.dtype, device=context.device)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, y, self.weight, self.bias, self._eps, backend=self._backend)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": whole(self.weight), "bias": whole(self.bias)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return (0.9, 1.1) if name == "weight" else (-0.1, 0.1)


class PositionGrid(WeightModule):
    """A square grid of learned positions, ``weight [side * side, size]``, read at fractional places.

    ``centred``: see ``grid_positions``.
    """

    def __init__(self, num_positions: int, size: int, context: ModelContext, *, centred: bool = False) -> None:
        super().__init__()
        self._backend, self._centred = context.backend, centred
        self.weight = empty_parameter(num_positions, size, dtype=context.dtype, device=context.device)

    def forward(self, places: Tensor) -> Tensor:
        """Return the embeddings ``[N, size]`` of patches at the positions of ``patch_places``."""
        return grid_positions(self.weight, places, centred=self._centred, backend=self._backend)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": whole(self.weight)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return -0.1, 0.1
