"""Quantisation of a checkpoint's linear layers: ``quantization_config`` in one vocabulary.

Job: read FP8 as Qwen and DeepSeek publish it (``quant_method: fp8``) and as ``compressed-tensors`` writes it, refuse
everything else by name, and decide which modules are quantised. Does not know: tensors, layers, kernels
(``weft/quantization``).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from weft.config.json_object import JsonObject
from weft.errors import ConfigError, UnsupportedModelError

BLOCK = 128
"""Side of the squares of a weight that share a scale under ``block``, and number of inputs of a token that share a
scale."""

SUPPORTED = (
    "supported are fp8 (e4m3, weight_block_size [128, 128], dynamic activations), compressed-tensors float-quantized "
    "(FP8 weights by channel or tensor; activations dynamic by token or static), and unquantised checkpoints, which "
    "--quantization fp8 quantises while they load"
)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """FP8 (e4m3) weights and activations of linear layers.

    Attributes:
        source: the checkpoint's ``quant_method``, or ``"online"``: bf16 weights quantised while they load.
        weights: the weights that share a scale: a ``block`` of 128 x 128, a ``channel`` (row), or the whole ``tensor``.
        activations: the inputs that share a scale: a ``group`` of 128 of one token, or a ``token``. ``static``: all
            inputs, with a scale from the checkpoint.
        targets: ``compressed-tensors``: modules that are quantised, by name, ``Linear`` or ``re:`` pattern.
        ignored: modules that are not quantised, by name or pattern.
        kv_cache: the checkpoint holds scales of an FP8 KV cache.
    """

    source: Literal["fp8", "compressed-tensors", "online"]
    weights: Literal["block", "channel", "tensor"]
    activations: Literal["group", "token", "static"]
    targets: tuple[str, ...] = ("Linear",)
    ignored: tuple[str, ...] = ()
    kv_cache: bool = False

    def quantizes(self, names: Iterable[str]) -> bool:
        """Whether a linear layer is quantised, by the names that it may have in a checkpoint."""
        matches = _matches_exactly if self.source == "compressed-tensors" else _matches_by_part
        names = tuple(names)
        ignored = any(matches(pattern, name) for pattern in self.ignored for name in names)
        return not ignored and any(t == "Linear" or matches(t, name) for t in self.targets for name in names)


ONLINE = QuantizationConfig("online", "channel", "token")
"""The form of ``--quantization fp8``: a scale per output channel and, at run time, one per token."""


def read_quantization(*configs: JsonObject) -> QuantizationConfig | None:
    """Read the quantisation in ``config.json`` (or its ``text_config``); None for an unquantised checkpoint.

    Raises:
        UnsupportedModelError: a method or a variant that Weft does not compute.
        ConfigError: values of the wrong type, or a pattern that is no regular expression.
    """
    for config in configs:
        for key in ("quantization_config", "compression_config"):
            found = config.object(key)
            if found is not None:
                return _read(found)
    return None


def _read(config: JsonObject) -> QuantizationConfig:
    method = config.raw("quant_method")
    readers: dict[Any, Callable[[JsonObject], QuantizationConfig]] = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
    }
    if method == "mxfp4":
        raise UnsupportedModelError(
            f"{config.where}: quant_method='mxfp4' is not supported; use the checkpoint in bfloat16: one published as "
            "such, or what transformers writes after from_pretrained(..., "
            "quantization_config=Mxfp4Config(dequantize=True), dtype='bfloat16') and save_pretrained(...)"
        )
    if method not in readers:
        raise UnsupportedModelError(f"{config.where}: quant_method={method!r} is not supported; {SUPPORTED}")
    return readers[method](config)


def _refuse(config: JsonObject, key: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{config.where}: {key}={config.raw(key)!r} is not supported; {SUPPORTED}")


def _read_fp8(config: JsonObject) -> QuantizationConfig:
    for key, allowed in (
        ("fmt", ("e4m3", None)),
        ("weight_block_size", ([BLOCK, BLOCK],)),
        ("activation_scheme", ("dynamic", None)),
        ("scale_fmt", ("float", None)),
    ):
        if config.raw(key) not in allowed:
            raise _refuse(config, key)
    ignored = _patterns(config, "modules_to_not_convert") + _patterns(config, "ignored_layers")
    return QuantizationConfig("fp8", "block", "group", ignored=ignored)


def _read_compressed_tensors(config: JsonObject) -> QuantizationConfig:
    if config.raw("format") != "float-quantized":
        raise _refuse(config, "format")
    sparsity = config.object("sparsity_config")
    if sparsity is not None and sparsity.values.get("format", "dense") != "dense":
        raise _refuse(sparsity, "format")
    groups = config.object("config_groups")
    if groups is None or not groups.values:
        raise ConfigError(f"{config.where}: config_groups is missing; it names the quantised modules")
    targets: tuple[str, ...] = ()
    schemes: set[tuple[Any, Any]] = set()
    for name in groups.values:
        group = groups.object(name)
        assert group is not None
        schemes.add((_weight_scheme(group), _activation_scheme(group)))
        targets += _patterns(group, "targets")
    if len(schemes) > 1:
        raise UnsupportedModelError(f"{groups.where}: groups of different schemes are not supported; {SUPPORTED}")
    ((weights, activations),) = schemes
    kv_cache = config.object("kv_cache_scheme")
    if kv_cache is not None and not _is_fp8(kv_cache, strategy="tensor", dynamic=False):
        raise _refuse(config, "kv_cache_scheme")
    ignored = _patterns(config, "ignore")
    return QuantizationConfig("compressed-tensors", weights, activations, targets, ignored, kv_cache is not None)


def _is_fp8(scheme: JsonObject, *, strategy: str, dynamic: bool) -> bool:
    given = {key: scheme.values.get(key) for key in ("num_bits", "type", "strategy")}
    return (
        given == {"num_bits": 8, "type": "float", "strategy": strategy}
        and bool(scheme.raw("dynamic")) == dynamic
        and scheme.values.get("symmetric", True) is True
    )


def _weight_scheme(group: JsonObject) -> str:
    scheme = group.object("weights")
    for strategy in ("channel", "tensor"):
        if scheme is not None and _is_fp8(scheme, strategy=strategy, dynamic=False):
            return strategy
    raise _refuse(group, "weights")


def _activation_scheme(group: JsonObject) -> str:
    scheme = group.object("input_activations")
    if scheme is not None and _is_fp8(scheme, strategy="token", dynamic=True):
        return "token"
    if scheme is not None and _is_fp8(scheme, strategy="tensor", dynamic=False):
        return "static"
    raise _refuse(group, "input_activations")


def _patterns(config: JsonObject, key: str) -> tuple[str, ...]:
    """A list of module names and patterns; empty if not given."""
    values = config.raw(key)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise config.wrong(key, "a list of module names or patterns")
    for value in values:
        try:
            re.compile(value.removeprefix("re:"))
        except re.error as error:
            why = f"which is not a valid pattern ({error})"
            raise ConfigError(f"{config.where}: {key} holds {value!r}, {why}") from None
    return tuple(values)


def _matches_by_part(pattern: str, name: str) -> bool:
    """Whether a pattern of ``quant_method: fp8`` matches: a module's name, the name of a parent, the end of the name
    after a dot, or a regular expression for the name or a parent's."""
    pattern = pattern.removeprefix("re:")
    return name.endswith(f".{pattern}") or re.match(rf"(?:{pattern})(?:\.|$)", name) is not None


def _matches_exactly(pattern: str, name: str) -> bool:
    """Whether a pattern of ``compressed-tensors`` matches: the name, or after ``re:`` a regular expression for its
    beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name
