"""The choice of a method for each layer's weights, made once from the checkpoint's config.

Job: walk through a new model, give every linear layer and all experts a method, and create their weights. Owns: the
table. Does not know: what methods do.
"""

import logging
from collections.abc import Callable, Iterable

from weft.config.quantization import QuantizationConfig, Scheme
from weft.errors import UnsupportedModelError
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, LinearMethod, MergedColumnParallelLinear
from weft.layers.moe import Experts, ExpertsMethod
from weft.layers.weight import LoadableModel
from weft.quantization.coded import CodedExperts, CodedLinear
from weft.quantization.fp8 import Fp8Experts, Fp8Linear
from weft.quantization.storage import BlockStorage, ChannelStorage, OnlineStorage, Storage
from weft.quantization.unquantized import UnquantizedExperts, UnquantizedLinear

logger = logging.getLogger(__name__)

STORAGES: dict[tuple[str, str, str], Callable[[], Storage]] = {
    ("fp8", "block", "group"): BlockStorage,
    ("compressed-tensors", "channel", "token"): lambda: ChannelStorage(per_tensor=False, static=False),
    ("compressed-tensors", "channel", "static"): lambda: ChannelStorage(per_tensor=False, static=True),
    ("compressed-tensors", "tensor", "token"): lambda: ChannelStorage(per_tensor=True, static=False),
    ("compressed-tensors", "tensor", "static"): lambda: ChannelStorage(per_tensor=True, static=True),
    ("online", "channel", "token"): OnlineStorage,
}
"""Storage of FP8 by source of the checkpoint, scales of weights, and scales of inputs."""


def create_weights(model: LoadableModel, quantization: QuantizationConfig | None, context: ModelContext) -> None:
    """Allocate the weights of all linear layers and experts of ``model``, uninitialised.

    Raises:
        ConfigError: blocks or groups that share a scale do not divide over parts or ranks.
        UnsupportedModelError: only some parts of a merged layer are quantised, and the layer does not support this.
    """
    chooser = _Chooser(model, quantization, context)
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            module.quant_method = chooser.linear(name, module)
            module.quant_method.create(module)
        elif isinstance(module, Experts):
            module.quant_method = chooser.experts(name, module)
            module.shared_joins = chooser.shared_joins(name, module)
            module.quant_method.create(module)
    for scheme in quantization.schemes if quantization is not None else ():
        if scheme.drops_activations:
            bits = 8 if scheme.form == "mxfp8" else 4
            logger.warning(
                "the checkpoint was made for inputs in %d bits; Weft leaves its inputs in the model's dtype", bits
            )


class _Chooser:
    def __init__(self, model: LoadableModel, quantization: QuantizationConfig | None, context: ModelContext) -> None:
        self._table, self._config, self._context = model.weight_table, quantization, context
        self._names = {module: name for name, module in model.named_modules()}

    def linear(self, name: str, layer: LinearBase) -> LinearMethod:
        scheme, names, plain = self._linear_scheme(name, layer)
        if scheme is None:
            return UnquantizedLinear(self._context)
        stand_last = set(list(names)[-len(plain) :]) == plain if plain else True
        if not stand_last or (plain and isinstance(layer, MergedColumnParallelLinear)):
            self._refuse(name, names.values())
        self._refuse_fused(name, scheme, names)
        if scheme.form == "fp8":
            return Fp8Linear(_storage(scheme), self._context, names, plain)
        return CodedLinear(scheme, self._context, names, plain)

    def _linear_scheme(self, name: str, layer: LinearBase) -> tuple[Scheme | None, dict[str, str], frozenset[str]]:
        """The form of a layer, the checkpoint's name of each part, and the parts that are not quantised."""
        names = {part: self._table.part_name(name, f"{part}weight") for part in layer.shard.parts}
        if not layer.quantizable:
            return None, names, frozenset(names)
        return self._scheme(name, names), names, self._plain(names)

    def experts(self, name: str, layer: Experts) -> ExpertsMethod:
        scheme = self._experts_scheme(name, layer)
        if scheme is None:
            return UnquantizedExperts(self._context)
        if scheme.form == "fp8":
            return Fp8Experts(_storage(scheme), self._context, name)
        if scheme.source != "online" and any("experts.gate_up_proj" in new for new in self._table.patterns.values()):
            raise UnsupportedModelError(
                f"{name}: {scheme.name} weights of all experts in one tensor are not read; use an unquantised "
                "checkpoint with --quantization int4"
            )
        return CodedExperts(scheme, self._context, name)

    def _experts_scheme(self, name: str, layer: Experts) -> Scheme | None:
        matrices = (*layer.gate_up_shard.parts, *layer.down_shard.parts)
        parts = {matrix: self._table.part_name(name, f"0.{matrix}weight") for matrix in matrices}
        scheme = self._scheme(name, parts)
        if scheme is not None and self._plain(parts):
            self._refuse(name, parts.values())
        return scheme

    def shared_joins(self, name: str, experts: Experts) -> bool:
        """Whether a shared expert as wide as the others has the same form. Static scales of inputs exclude that,
        because the other experts share one."""
        linears = experts.shared_linears or {}
        kinds = {self._linear_scheme(self._names[layer], layer)[0] for layer in linears.values()}
        scheme = self._experts_scheme(name, experts)
        return kinds == {scheme} and (scheme is None or scheme.activations != "static")

    def _scheme(self, name: str, parts: dict[str, str]) -> Scheme | None:
        """The form of the quantised ones of some parts, given by their names in the checkpoint."""
        found = {self._part_scheme(part) for part in parts.values()} - {None}
        if len(found) > 1:
            forms = ", ".join(sorted(scheme.name for scheme in found if scheme is not None))
            raise UnsupportedModelError(
                f"quantization_config gives {', '.join(parts.values())} several forms ({forms}), but Weft computes "
                f"them together ({name}); give all of them the same bits, group size and symmetry"
            )
        return next(iter(found), None)

    def _part_scheme(self, name: str) -> Scheme | None:
        return None if self._config is None else self._config.scheme(self._table.published_names(name))

    def _plain(self, parts: dict[str, str]) -> frozenset[str]:
        """The unquantised ones of some parts, given by their names in the checkpoint."""
        return frozenset(part for part, name in parts.items() if self._part_scheme(name) is None)

    def _refuse(self, name: str, parts: Iterable[str]) -> None:
        raise UnsupportedModelError(
            f"quantization_config quantises some of {', '.join(parts)} and not others, but Weft computes them together "
            f"({name}); list all of them among the modules that are not converted, or none"
        )

    def _refuse_fused(self, name: str, scheme: Scheme, names: dict[str, str]) -> None:
        """Refuse tensors that hold the rows of several parts in a form whose rows are packed."""
        if (
            name.rpartition(".")[2] in self._table.fused
            and len(names) > 1
            and not {scheme.form, scheme.source} & {"fp8", "online"}
        ):
            raise UnsupportedModelError(
                f"{next(iter(names.values()))}: {scheme.name} weights of several projections in one tensor are not "
                "read; use an unquantised checkpoint with --quantization int4"
            )


def _storage(scheme: Scheme) -> Storage:
    return STORAGES[(scheme.source, scheme.weights, scheme.activations)]()
