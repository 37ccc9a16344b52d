"""The interface of quantisation methods: how a layer's weights are stored and multiplied.

Job: the contract between layers and ``weft/quantization``, which implements it. A method is chosen once per layer, when
the model has been built and every layer has a name; until then a layer has no weights. ``LinearMethod`` is in
``linear.py`` and ``ExpertsMethod`` in ``moe.py``, beside the layers that call them.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from weft.layers.weight import WeightLayout, WeightModule, uniform_range

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
    def layouts(self, layer: Layer) -> tuple[WeightLayout, ...]:
        """Return the checkpoint tensors that fill the parameters, as ``WeightModule.layouts``."""

    def initial_range(self, layer: Layer, name: str) -> tuple[float, float]:
        """Bounds of random values of parameter ``name``, as ``WeightModule.initial_range``."""
        return uniform_range(layer.get_parameter(name).shape[-1])
