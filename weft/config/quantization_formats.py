"""``quantization_config`` of published checkpoints: which are read, and which are refused by name.

Job: turn the keys of FP8 (Qwen, DeepSeek), ``compressed-tensors``, GPTQ, AWQ, AutoRound, ModelOpt and gpt-oss into
``QuantizationConfig``. Does not know: tensors.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from weft.config.json_object import JsonObject
from weft.config.quantization import BLOCK, Form, QuantizationConfig, Rule, Scheme
from weft.errors import ConfigError, UnsupportedModelError

GROUPS = (32, 64, 128)
"""Weights of a row that may share a scale in integer formats. -1 stands for the whole row."""
_MX = 32
"""Weights of a row that share a scale in MXFP4 and MXFP8."""

FORMATS = {
    "fp8": "FP8 (e4m3) by blocks of 128 x 128, dynamic activations; MXFP8 (blocks of 1 x 32), weights alone",
    "compressed-tensors float-quantized": "FP8 (e4m3) by channel or tensor",
    "compressed-tensors pack-quantized": "INT4 and INT8, symmetric or not, groups of 32, 64, 128 or rows",
    "compressed-tensors nvfp4-pack-quantized": "E2M1 in groups of 16, weights alone",
    "compressed-tensors mxfp4-pack-quantized": "E2M1 in groups of 32, weights alone",
    "compressed-tensors mxfp8-quantized": "E4M3 in groups of 32, weights alone",
    "gptq": "INT4 and INT8, desc_act=false",
    "awq": "INT4, version gemm",
    "auto-round": "INT4 and INT8 in the packing of GPTQ or AWQ",
    "modelopt NVFP4": "E2M1 in groups of 16, weights alone",
    "mxfp4": "the experts of gpt-oss",
}
"""Formats of checkpoints that Weft reads, each with its possible content."""

SUPPORTED = (
    f"supported are {'; '.join(f'{name} ({what})' for name, what in FORMATS.items())}; and unquantised checkpoints, "
    "which --quantization fp8 or --quantization int4 quantises while they load"
)


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


def read_quantization_file(folder: Path) -> QuantizationConfig | None:
    """Read ``hf_quant_config.json``, which files of ModelOpt have instead of a key in ``config.json``, or besides it.

    Raises: as ``read_quantization``.
    """
    path = folder / "hf_quant_config.json"
    found = JsonObject.load(path).object("quantization") if path.is_file() else None
    return None if found is None or found.raw("quant_algo") is None else _read_modelopt(found)


def _read(config: JsonObject) -> QuantizationConfig:
    method = config.raw("quant_method")
    readers: dict[Any, Callable[[JsonObject], QuantizationConfig]] = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "auto-round": _read_auto_round,
        "modelopt": _read_modelopt,
        "mxfp4": _read_gpt_oss,
    }
    if method not in readers:
        raise UnsupportedModelError(f"{config.where}: quant_method={method!r} is not supported; {SUPPORTED}")
    return readers[method](config)


def _refuse(config: JsonObject, key: str, allowed: str = "") -> UnsupportedModelError:
    allowed = f"allowed here: {allowed}" if allowed else SUPPORTED
    return UnsupportedModelError(f"{config.where}: {key}={config.raw(key)!r} is not supported; {allowed}")


# --- FP8 --------------------------------------------------------------------------------------------------------------


def _read_fp8(config: JsonObject) -> QuantizationConfig:
    mxfp8 = config.raw("weight_block_size") == [1, _MX]
    for key, allowed in (
        ("fmt", ("e4m3", None)),
        ("weight_block_size", ([BLOCK, BLOCK], [1, _MX])),
        ("activation_scheme", ("dynamic", None)),
        ("scale_fmt", ("ue8m0",) if mxfp8 else ("float", None)),
    ):
        if config.raw(key) not in allowed:
            raise _refuse(config, key)
    ignored = _patterns(config, "modules_to_not_convert") + _patterns(config, "ignored_layers")
    scheme = _mxfp8("fp8", drops_activations=True) if mxfp8 else Scheme("fp8", "fp8", "block", "group")
    return QuantizationConfig("fp8", (*_left_out(ignored, "part"), Rule(scheme, match="part")))


def _mxfp8(source: Literal["fp8", "compressed-tensors"], *, drops_activations: bool) -> Scheme:
    return Scheme(source, "mxfp8", "group", "none", _MX, scales="e8m0", drops_activations=drops_activations)


def _left_out(patterns: tuple[str, ...], match: Literal["exact", "part", "inside", "begin"]) -> tuple[Rule, ...]:
    return (Rule(None, patterns, match),) if patterns else ()


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _read_compressed_tensors(config: JsonObject) -> QuantizationConfig:
    sparsity = config.object("sparsity_config")
    if sparsity is not None and sparsity.values.get("format", "dense") != "dense":
        raise _refuse(sparsity, "format")
    transforms = config.object("transform_config")
    if transforms is not None and transforms.values:
        raise _refuse(config, "transform_config", "none, because transforms would have to run on every input")
    groups = config.object("config_groups")
    if groups is None or not groups.values:
        raise ConfigError(f"{config.where}: config_groups is missing; it names the quantised modules")
    rules = []
    for name in groups.values:
        group = groups.object(name)
        assert group is not None
        rules.append(Rule(_scheme_of_group(group, config), _patterns(group, "targets") or ("Linear",)))
    rules.sort(key=lambda rule: "Linear" in rule.patterns)  # names and patterns have precedence over classes
    kv_cache = config.object("kv_cache_scheme")
    if kv_cache is not None and not _is_fp8(kv_cache, strategy="tensor", dynamic=False):
        raise _refuse(config, "kv_cache_scheme")
    left_out = _left_out(_patterns(config, "ignore"), "exact")
    return QuantizationConfig("compressed-tensors", (*left_out, *rules), kv_cache is not None)


def _scheme_of_group(group: JsonObject, config: JsonObject) -> Scheme:
    where = group if group.given("format") else config
    kind = where.raw("format")
    readers = {
        "float-quantized": _float_quantized,
        "pack-quantized": _pack_quantized,
        "nvfp4-pack-quantized": _fp4_quantized,
        "mxfp4-pack-quantized": _fp4_quantized,
        "mxfp8-quantized": _mxfp8_quantized,
    }
    if kind not in readers:
        raise _refuse(where, "format")
    return readers[kind](group)


def _float_quantized(group: JsonObject) -> Scheme:
    return Scheme("compressed-tensors", "fp8", _fp8_weights(group), _fp8_activations(group))


def _pack_quantized(group: JsonObject) -> Scheme:
    if group.given("input_activations"):
        raise _refuse(
            group, "input_activations", "none, because pack-quantized weights are multiplied with 16-bit inputs"
        )
    weights = group.object("weights")
    if weights is None or weights.raw("type") != "int" or weights.raw("dynamic"):
        raise _refuse(group, "weights")
    if weights.raw("actorder") in ("group", True):
        raise _refuse(weights, "actorder", "null, 'static' or 'weight', which keep a group's weights together")
    return _integer_scheme(
        "compressed-tensors", weights, "num_bits", _group_of(weights), weights.boolean("symmetric", True)
    )


def _group_of(weights: JsonObject) -> int:
    strategy = weights.raw("strategy")
    if strategy == "group":
        return weights.integer("group_size", low=-1)
    if strategy != "channel":
        raise _refuse(weights, "strategy", "'group' or 'channel'")
    return -1


def _integer_scheme(source: Any, config: JsonObject, key: str, group: int, symmetric: bool) -> Scheme:
    """The form of integers with ``config[key]`` bits, with a scale for ``group`` weights."""
    forms: dict[Any, Form] = {4: "int4", 8: "int8"}
    if config.raw(key) not in forms:
        raise _refuse(config, key, "4 or 8 bits")
    if group not in (-1, *GROUPS):
        raise UnsupportedModelError(
            f"{config.where}: group_size={group} is not supported; allowed are {', '.join(map(str, GROUPS))}, and -1 "
            "for whole rows"
        )
    weights: Literal["channel", "group"] = "channel" if group == -1 else "group"
    return Scheme(source, forms[config.raw(key)], weights, "none", max(group, 0), symmetric)


def _fp4_quantized(group: JsonObject) -> Scheme:
    weights = group.object("weights")
    given = None if weights is None else (weights.raw("num_bits"), weights.raw("type"), weights.raw("group_size"))
    if given == (4, "float", 16):
        scheme = Scheme("compressed-tensors", "fp4", "group", "none", 16, scales="e4m3")
    elif given == (4, "float", 32):
        scheme = Scheme("compressed-tensors", "fp4", "group", "none", 32, scales="e8m0")
    else:
        raise _refuse(group, "weights", "4 bits of type float in groups of 16 (NVFP4) or 32 (MXFP4)")
    return replace(scheme, drops_activations=group.given("input_activations"))


def _mxfp8_quantized(group: JsonObject) -> Scheme:
    weights = group.object("weights")
    given = None if weights is None else (weights.raw("num_bits"), weights.raw("type"), weights.raw("group_size"))
    if given != (8, "float", _MX):
        raise _refuse(group, "weights", f"8 bits of type float in groups of {_MX}")
    return _mxfp8("compressed-tensors", drops_activations=group.given("input_activations"))


def _is_fp8(scheme: JsonObject, *, strategy: str, dynamic: bool) -> bool:
    given = {key: scheme.values.get(key) for key in ("num_bits", "type", "strategy")}
    return (
        given == {"num_bits": 8, "type": "float", "strategy": strategy}
        and bool(scheme.raw("dynamic")) == dynamic
        and scheme.values.get("symmetric", True) is True
    )


def _fp8_weights(group: JsonObject) -> Literal["channel", "tensor"]:
    scheme = group.object("weights")
    strategies: tuple[Literal["channel", "tensor"], ...] = ("channel", "tensor")
    for strategy in strategies:
        if scheme is not None and _is_fp8(scheme, strategy=strategy, dynamic=False):
            return strategy
    raise _refuse(group, "weights")


def _fp8_activations(group: JsonObject) -> Literal["token", "static"]:
    scheme = group.object("input_activations")
    if scheme is not None and _is_fp8(scheme, strategy="token", dynamic=True):
        return "token"
    if scheme is not None and _is_fp8(scheme, strategy="tensor", dynamic=False):
        return "static"
    raise _refuse(group, "input_activations")


# --- GPTQ, AWQ, AutoRound ---------------------------------------------------------------------------------------------


def _read_gptq(config: JsonObject) -> QuantizationConfig:
    if config.boolean("desc_act", False):
        raise _refuse(
            config, "desc_act", "false: weights of one group have to be neighbours; quantise with desc_act=False"
        )
    if config.boolean("lm_head", False):
        raise _refuse(config, "lm_head", "false: the output head is not quantised")
    sources = {"gptq": "gptq", "gptq_v2": "gptq_v2", "": "gptq"}
    stored = config.raw("checkpoint_format") or ""
    if stored not in sources:
        raise _refuse(config, "checkpoint_format", "'gptq' and 'gptq_v2'")
    scheme = _integer_scheme(
        sources[stored], config, "bits", config.integer("group_size", 128, low=-1), config.boolean("sym", True)
    )
    rules = tuple(_gptq_rules(config.object("dynamic"), scheme, config))
    inside = config.raw("modules_in_block_to_quantize")
    if inside is None:
        return QuantizationConfig("gptq", (*rules, Rule(scheme)))
    flat = tuple(name for names in inside for name in ([names] if isinstance(names, str) else names))
    return QuantizationConfig("gptq", (*rules, Rule(scheme, flat, "inside")))


def _gptq_rules(dynamic: JsonObject | None, scheme: Scheme, config: JsonObject) -> list[Rule]:
    """The exceptions of GPTQModel: ``-:pattern`` leaves modules out, ``pattern`` or ``+:pattern`` changes settings."""
    rules = []
    for key in dynamic.values if dynamic is not None else ():
        assert dynamic is not None
        pattern = _checked(key.partition(":")[2] if key[:2] in ("-:", "+:") else key, config, "dynamic")
        changes = dynamic.object(key)
        if key.startswith("-:"):
            rules.append(Rule(None, (pattern,), "begin"))
        elif changes is not None and changes.values:
            rules.append(Rule(_changed(changes, scheme, "sym"), (pattern,), "begin"))
    return rules


def _changed(changes: JsonObject, scheme: Scheme, symmetric: str) -> Scheme:
    """``scheme`` with the bits, the group size and the symmetry that one module has."""
    bits = {"bits": 8 if scheme.form == "int8" else 4} | changes.values
    group = changes.integer("group_size", scheme.group or -1, low=-1)
    return _integer_scheme(
        scheme.source, JsonObject(bits, changes.where), "bits", group, changes.boolean(symmetric, scheme.symmetric)
    )


def _read_awq(config: JsonObject) -> QuantizationConfig:
    if config.text("version", "gemm").lower() != "gemm":
        raise _refuse(config, "version", "'gemm'")
    if "bits" not in config.values:
        config = JsonObject(config.values | {"bits": config.raw("w_bit")}, config.where)
    if config.raw("bits") != 4:
        raise _refuse(config, "bits", "4 bits")
    group = config.integer("group_size", config.integer("q_group_size", 128, low=-1), low=-1)
    scheme = _integer_scheme("awq", config, "bits", group, not config.boolean("zero_point", True))
    left_out = _left_out(_patterns(config, "modules_to_not_convert"), "inside")
    return QuantizationConfig("awq", (*left_out, Rule(scheme)))


_PACKINGS: dict[str, Literal["gptq", "gptq_v2", "awq"]] = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
"""AutoRound's name of a packing -> the arrangement of its tensors."""


def _read_auto_round(config: JsonObject) -> QuantizationConfig:
    packing = config.text("packing_format", "auto_round:auto_gptq")
    if packing not in _PACKINGS:
        raise _refuse(config, "packing_format", ", ".join(_PACKINGS))
    if config.text("data_type", "int") != "int":
        raise _refuse(config, "data_type", "'int'")
    if (config.raw("act_bits") or 16) < 16:
        raise _refuse(config, "act_bits", "16")
    group = config.integer("group_size", 128, low=-1)
    scheme = _integer_scheme(_PACKINGS[packing], config, "bits", group, config.boolean("sym", True))
    rules = []
    exceptions = config.object("extra_config")
    for key in exceptions.values if exceptions is not None else ():
        assert exceptions is not None
        changes = exceptions.object(key)
        assert changes is not None
        plain = changes.raw("bits") is not None and changes.raw("bits") >= 16
        rules.append(Rule(None if plain else _changed(changes, scheme, "sym"), (_checked(key, config, key),), "begin"))
    blocks = config.raw("block_name_to_quantize") or config.raw("to_quant_block_names") or ()
    names = tuple(blocks.split(",")) if isinstance(blocks, str) else tuple(blocks)
    return QuantizationConfig("auto-round", (*rules, Rule(scheme, tuple(f"{name}." for name in names), "inside")))


# --- ModelOpt, gpt-oss ------------------------------------------------------------------------------------------------


def _read_modelopt(config: JsonObject) -> QuantizationConfig:
    if config.raw("quant_algo") != "NVFP4":
        raise _refuse(config, "quant_algo", "'NVFP4'")
    scheme = Scheme("modelopt", "fp4", "group", "none", 16, scales="e4m3", drops_activations=True)
    patterns = _names(config, "ignore") + _names(config, "exclude_modules")
    left_out = _left_out(tuple(_from_glob(pattern) for pattern in patterns), "begin")
    return QuantizationConfig("modelopt", (*left_out, Rule(scheme)))


def _from_glob(pattern: str) -> str:
    """A regular expression for a name, or a parent's, in which ``*`` stands for anything."""
    return ".*".join(re.escape(part) for part in pattern.split("*")) + r"(\.|$)"


def _read_gpt_oss(config: JsonObject) -> QuantizationConfig:
    scheme = Scheme("gpt-oss", "fp4", "group", "none", 32, scales="e8m0")
    return QuantizationConfig("mxfp4", (Rule(scheme, (".experts.",), "inside"),))


# --- patterns ---------------------------------------------------------------------------------------------------------


def _patterns(config: JsonObject, key: str) -> tuple[str, ...]:
    """A list of module names and patterns; empty if not given."""
    return tuple(_checked(value, config, key) for value in _names(config, key))


def _names(config: JsonObject, key: str) -> tuple[str, ...]:
    values = config.raw(key)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise config.wrong(key, "a list of module names or patterns")
    return tuple(values)


def _checked(value: str, config: JsonObject, key: str) -> str:
    try:
        re.compile(value.removeprefix("re:"))
    except re.error as error:
        why = f"which is not a valid pattern ({error})"
        raise ConfigError(f"{config.where}: {key} holds {value!r}, {why}") from None
    return value
