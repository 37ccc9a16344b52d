"""The interface of quantisation methods: how a layer's weights are stored and multiplied.

Job: the contract between layers and ``weft/quantization``, which implements it. A method is chosen once per layer, when
the model has been built and every layer has a name; until then a layer has no weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch import Tensor

from weft.layers.weight import Layout, WeightModule, uniform_range
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows

if TYPE_CHECKING:
    from weft.layers.linear import LinearBase
    from weft.layers.moe import Experts

Layer = TypeVar("Layer", bound=WeightModule)


class QuantMethod(ABC, Generic[Layer]):
    """Storage of one layer's weights."""

    @abstractmethod
    def create(self, layer: Layer) -> None:
        """Allocate the layer's parameters, uninitialised.

        Raises:
            ConfigError: the stored form does not divide over parts or ranks as the layer does.
        """

    @abstractmethod
    def layouts(self, layer: Layer) -> tuple[Layout, ...]:
        """Which checkpoint tensors fill them, as ``WeightModule.layouts``."""

    def initial_range(self, layer: Layer, name: str) -> tuple[float, float]:
        """Bounds of random values of parameter ``name``, as ``WeightModule.initial_range``."""
        return uniform_range(layer.get_parameter(name).shape[-1])


class LinearMethod(QuantMethod["LinearBase"]):
    """A matrix ``[N, K]``."""

    @abstractmethod
    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + b``: ``[..., K] -> [..., N]`` in x's dtype."""

    def apply_parts(self, layer: LinearBase, x: Tensor, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        """``x W^T``: ``[T, K] -> [T, N]``, or ``[S, T, N]``, or sent to ``peers``, as
        ``weft.ops.linear.linear_parts``."""
        return self.apply(layer, x, None)

    @abstractmethod
    def apply_silu_mul(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """``silu(x G^T) * (x U^T)`` of a merged ``G`` and ``U``: ``[..., K] -> [..., N / 2]`` in x's dtype."""


class Routed(NamedTuple):
    """Which experts each token meets, and an expert that sees all of them: arguments of ``weft.ops.moe.fused_moe``."""

    weights: Tensor
    ids: Tensor
    shared: Tensor | None = None
    shared_gate: Tensor | None = None


class ExpertsMethod(QuantMethod["Experts"]):
    """The merged gate and up projections of all experts, and their down projections."""

    @abstractmethod
    def apply(self, experts: Experts, x: Tensor, routed: Routed, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        """The routed experts' weighted sum, as ``weft.ops.moe.fused_moe``: ``[T, H] -> [T, H]``. Ids reach the shared
        expert only where ``experts.shared_joins`` says so. With ``peers``, as ``send_fused_moe``."""
