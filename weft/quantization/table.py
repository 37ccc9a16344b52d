"""The choice of a method for each layer's weights, made once from the checkpoint's config.

Job: walk through a new model, give every linear layer and all experts a method, and create their weights. Owns: the
table. Does not know: what methods do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.config.quantization import QuantizationConfig
from weft.errors import UnsupportedModelError
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, MergedColumnParallelLinear
from weft.layers.moe import Experts
from weft.layers.weight import LoadableModel
from weft.quantization.fp8 import Fp8Experts, Fp8Linear
from weft.quantization.storage import BlockStorage, ChannelStorage, OnlineStorage, Storage
from weft.quantization.unquantized import UnquantizedExperts, UnquantizedLinear

STORAGES: dict[tuple[str, str, str], Callable[[], Storage]] = {
    ("fp8", "block", "group"): BlockStorage,
    ("compressed-tensors", "channel", "token"): lambda: ChannelStorage(per_tensor=False, static=False),
    ("compressed-tensors", "channel", "static"): lambda: ChannelStorage(per_tensor=False, static=True),
    ("compressed-tensors", "tensor", "token"): lambda: ChannelStorage(per_tensor=True, static=False),
    ("compressed-tensors", "tensor", "static"): lambda: ChannelStorage(per_tensor=True, static=True),
    ("online", "channel", "token"): OnlineStorage,
}
"""Storage by source of the checkpoint, scales of weights, and scales of inputs."""


def create_weights(model: LoadableModel, quantization: QuantizationConfig | None, context: ModelContext) -> None:
    """Allocate the weights of all linear layers and experts of ``model``, uninitialised.

    Raises:
        ConfigError: blocks that share a scale do not divide over parts or ranks.
        UnsupportedModelError: only some parts of a merged layer are quantised, and the layer does not support this.
    """
    chooser = _Chooser(model, quantization, context)
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            module.quant_method = chooser.linear(name, module)
            module.quant_method.create(module)
        elif isinstance(module, Experts):
            module.quant_method = chooser.experts(name, module)
            module.shared_joins = chooser.shared_joins(module)
            module.quant_method.create(module)


class _Chooser:
    def __init__(self, model: LoadableModel, quantization: QuantizationConfig | None, context: ModelContext) -> None:
        self._table, self._config, self._context = model.weight_table, quantization, context
        self._names = {module: name for name, module in model.named_modules()}
        self._storage = None
        if quantization is not None:
            key = (quantization.source, quantization.weights, quantization.activations)
            self._storage = STORAGES[key]()

    def linear(self, name: str, layer: LinearBase) -> UnquantizedLinear | Fp8Linear:
        names = {part: self._table.part_name(name, f"{part}weight") for part in layer.shard.parts}
        plain = self._plain(names)
        if self._storage is None or not layer.quantizable or len(plain) == len(names):
            return UnquantizedLinear(self._context)
        stand_last = set(list(names)[-len(plain) :]) == plain if plain else True
        if not stand_last or (plain and isinstance(layer, MergedColumnParallelLinear)):
            self._refuse(name, names.values())
        return Fp8Linear(self._storage, self._context, names, plain)

    def experts(self, name: str, layer: Experts) -> UnquantizedExperts | Fp8Experts:
        matrices = (*layer.gate_up_shard.parts, *layer.down_shard.parts)
        parts = {matrix: self._table.part_name(name, f"0.{matrix}weight") for matrix in matrices}
        plain = self._plain(parts)
        if self._storage is None or len(plain) == len(parts):
            return UnquantizedExperts(self._context)
        if plain:
            self._refuse(name, parts.values())
        return Fp8Experts(self._storage, self._context, name)

    def shared_joins(self, experts: Experts) -> bool:
        """Whether a shared expert as wide as the others has the same storage. Static scales of inputs exclude that,
        because the other experts share one."""
        linears = experts.shared_linears or {}
        kinds = {type(self.linear(self._names[layer], layer)) for layer in linears.values()}
        static = self._storage is not None and self._storage.static
        alike = {UnquantizedExperts: UnquantizedLinear, Fp8Experts: Fp8Linear}[type(experts.quant_method)]
        return kinds == {alike} and not static

    def _plain(self, parts: dict[str, str]) -> frozenset[str]:
        """The unquantised ones of some parts, given by their names in the checkpoint."""
        if self._config is None:
            return frozenset(parts)
        quantizes, names = self._config.quantizes, self._table.published_names
        return frozenset(part for part, name in parts.items() if not quantizes(names(name)))

    def _refuse(self, name: str, parts: Iterable[str]) -> None:
        raise UnsupportedModelError(
            f"quantization_config quantises some of {', '.join(parts)} and not others, but Weft computes them together "
            f"({name}); list all of them among the modules that are not converted, or none"
        )
