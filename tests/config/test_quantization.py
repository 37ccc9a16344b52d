"""Reading a ``quantization_config``: schemes, the modules that the config names, and refusals."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.fp8_checkpoints import SCHEMES, quantization_config
from weft.config.json_object import JsonObject
from weft.config.quantization import ONLINE, QuantizationConfig
from weft.config.quantization_formats import read_quantization
from weft.errors import ConfigError, UnsupportedModelError


def read(config: dict[str, Any]) -> QuantizationConfig:
    found = read_quantization(JsonObject({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


def block(**changes: Any) -> dict[str, Any]:
    return quantization_config("block") | changes


def compressed(scheme: str = "channel-token", **changes: Any) -> dict[str, Any]:
    return quantization_config(scheme) | changes


def group(part: str, **changes: Any) -> dict[str, Any]:
    config = compressed()
    config["config_groups"]["group_0"][part] |= changes
    return config


def test_schemes() -> None:
    found = [read(quantization_config(scheme)) for scheme in SCHEMES]
    assert [(c.main.weights, c.main.activations) for c in found] == [
        ("block", "group"), ("channel", "token"), ("channel", "static"), ("tensor", "token"), ("tensor", "static"),
    ]  # fmt: skip
    assert {c.source for c in found} == {"fp8", "compressed-tensors"}


def test_an_unquantised_checkpoint() -> None:
    assert read_quantization(JsonObject({"quantization_config": None}, "config.json"), JsonObject({}, "text")) is None


def test_the_config_of_a_part_counts() -> None:
    text = JsonObject({"quantization_config": block()}, "text")
    assert read_quantization(JsonObject({}, "config.json"), text) == read(block())
    older = JsonObject({"compression_config": compressed()}, "config.json")
    assert read_quantization(older) == read(compressed())


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def test_a_kv_cache_scheme_is_noted() -> None:
    assert read(compressed(kv_cache_scheme=KV_SCHEME)).kv_cache
    assert not read(compressed()).kv_cache


GATE, GATE_PROJ = "model.layers.11.mlp.gate", "model.layers.11.mlp.gate_proj"


@pytest.mark.parametrize(
    ("entry", "name", "matches"),
    [
        ("lm_head", "lm_head", True),
        (GATE, GATE, True),
        (GATE, GATE_PROJ, False),
        ("mlp.gate", GATE, True),
        ("mlp.gate", GATE_PROJ, False),
        ("model.layers.1", GATE, False),
        ("model.layers.11", GATE, True),
        ("model.layers.1", "model.layers.1.mlp.gate", True),
        (r"model\.layers\.\d+\.mlp\.gate", GATE, True),
        ("re:.*gate", GATE, True),
        ("re:.*gate", GATE_PROJ, False),
        ("re:.*gate.*", GATE_PROJ, True),
    ],
)
def test_modules_to_not_convert(entry: str, name: str, matches: bool) -> None:
    assert (read(block(modules_to_not_convert=[entry])).scheme([name]) is None) is matches
    assert (read(block(modules_to_not_convert=None, ignored_layers=[entry])).scheme([name]) is None) is matches


@pytest.mark.parametrize(
    ("entry", "name", "matches"),
    [
        (GATE, GATE, True),
        ("mlp.gate", GATE, False),
        ("re:.*mlp.gate$", GATE, True),
        ("re:.*mlp.gate$", GATE_PROJ, False),
        ("re:.*mlp.gate", GATE_PROJ, True),
        ("re:mlp.gate", GATE, False),
    ],
)
def test_ignore(entry: str, name: str, matches: bool) -> None:
    assert (read(compressed(ignore=[entry])).scheme([name]) is None) is matches


def test_a_name_for_each_layer_is_found_at_once() -> None:
    """A model of a hundred layers lists a thousand names. Compared one by one, they would take a minute."""
    names = [f"model.layers.{layer}.mlp.{part}" for layer in range(200) for part in "abcdefghij"]
    config = read(block(modules_to_not_convert=names))
    began = time.process_time()
    assert all(config.scheme([f"{name}.weight"]) is None for name in names)
    assert config.scheme(["model.layers.200.mlp.a"]) is not None
    assert time.process_time() - began < 2.0


def test_targets_by_pattern() -> None:
    config = compressed(ignore=[])
    first = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = first | {"targets": ["model.layers.0.self_attn.q_proj"]}
    first["targets"] = ["re:.*mlp.*"]
    found = read(config)
    assert found.scheme([GATE_PROJ]) and found.scheme(["model.layers.0.self_attn.q_proj"])
    assert found.scheme(["model.layers.0.self_attn.k_proj"]) is None


def test_any_published_name_counts() -> None:
    names = ["model.layers.0.mlp.gate_proj", "model.language_model.layers.0.mlp.gate_proj"]
    assert read(block(modules_to_not_convert=[names[1]])).scheme(names) is None
    assert read(block()).scheme(names) and ONLINE.scheme(names)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes' is not supported; supported are fp8 .*--quantization fp8"),
        ({}, "quant_method=None is not supported"),
        (block(fmt="e5m2"), "fmt='e5m2' is not supported"),
        (block(weight_block_size=[64, 128]), r"weight_block_size=\[64, 128\] is not supported"),
        (block(weight_block_size=None), "weight_block_size=None is not supported"),
        (block(activation_scheme="static"), "activation_scheme='static' is not supported"),
        (block(scale_fmt="ue8m0"), "scale_fmt='ue8m0' is not supported"),
        (block(weight_block_size=[1, 32]), "scale_fmt=None is not supported"),
        (block(weight_block_size=[1, 64], scale_fmt="ue8m0"), r"weight_block_size=\[1, 64\] is not supported"),
        (compressed(format="int-quantized"), "format='int-quantized' is not supported"),
        (compressed(format="pack-quantized"), "input_activations=.* is not supported; allowed here: none"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (group("weights", num_bits=4), "weights=.*'num_bits': 4.* is not supported"),
        (group("weights", strategy="group"), "'strategy': 'group'.* is not supported"),
        (group("weights", type="int"), "'type': 'int'.* is not supported"),
        (group("input_activations", strategy="tensor"), "input_activations=.* is not supported"),
        (compressed(kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme=.*is not supported"),
        (compressed(kv_cache_scheme=KV_SCHEME | {"dynamic": True}), "kv_cache_scheme=.*is not supported"),
        (group("weights", symmetric=False), "'symmetric': False.* is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(config)


def test_groups_of_different_schemes() -> None:
    """Names have precedence over classes, in whatever order the groups stand."""
    config = compressed(ignore=[])
    config["config_groups"]["group_1"] = packed_group(["re:.*down_proj"]) | {"format": "pack-quantized"}
    found = read(config)
    forms = [found.scheme([f"model.layers.0.mlp.{name}"]) for name in ("up_proj", "down_proj")]
    assert [scheme.form for scheme in forms if scheme is not None] == ["fp8", "int4"]
    assert found.name == "int4 and fp8" and found.main.form == "fp8"


def packed_group(targets: list[str], **weights: Any) -> dict[str, Any]:
    common = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
    return {"targets": targets, "weights": common | weights, "input_activations": None}


def packed(**weights: Any) -> dict[str, Any]:
    return compressed(format="pack-quantized", config_groups={"group_0": packed_group(["Linear"], **weights)})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"type": "float", "group_size": 32}


@pytest.mark.parametrize(
    ("config", "name", "group", "symmetric"),
    [
        (packed(), "int4", 128, True),
        (packed(num_bits=8, strategy="channel", group_size=None, symmetric=False), "int8", 0, False),
        (compressed(format="nvfp4-pack-quantized", config_groups={"a": packed_group([], **NVFP4)}), "nvfp4", 16, True),
        (compressed(format="mxfp4-pack-quantized", config_groups={"a": packed_group([], **MXFP4)}), "mxfp4", 32, True),
        (GPTQ, "int4", 128, True),
        (GPTQ | {"bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"}, "int8", 0, False),
        (AWQ, "int4", 128, False),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}, "int4", 64, False),
        (AUTO_ROUND, "int4", 128, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}, "nvfp4", 16, True),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4", 32, True),
    ],
)  # fmt: skip
def test_forms_of_four_and_eight_bits(config: dict[str, Any], name: str, group: int, symmetric: bool) -> None:
    scheme = read(config).main
    assert (scheme.name, scheme.group, scheme.symmetric) == (name, group, symmetric)
    assert scheme.activations == "none" and scheme.bytes_per_weight < 1.02


MXFP8 = {"num_bits": 8, "type": "float", "group_size": 32}
MXFP8_GROUP = packed_group([], **MXFP8)
MXFP8_INPUTS = {"input_activations": MXFP8 | {"dynamic": True}}


@pytest.mark.parametrize(
    ("config", "drops"),
    [
        (block(weight_block_size=[1, 32], scale_fmt="ue8m0"), True),
        (compressed(format="mxfp8-quantized", config_groups={"a": MXFP8_GROUP}), False),
        (compressed(format="mxfp8-quantized", config_groups={"a": MXFP8_GROUP | MXFP8_INPUTS}), True),
    ],
)  # fmt: skip
def test_mxfp8(config: dict[str, Any], drops: bool) -> None:
    scheme = read(config).main
    assert (scheme.name, scheme.form, scheme.group, scheme.scales) == ("mxfp8", "mxfp8", 32, "e8m0")
    assert scheme.activations == "none" and scheme.drops_activations == drops
    assert scheme.bytes_per_weight == 1 + 1 / 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (packed(num_bits=3), "num_bits=3 is not supported; allowed here: 4 or 8 bits"),
        (packed(group_size=48), "group_size=48 is not supported; allowed are 32, 64, 128, and -1"),
        (packed(strategy="tensor"), "strategy='tensor' is not supported; allowed here: 'group' or 'channel'"),
        (packed(actorder="group"), "actorder='group' is not supported"),
        (packed(type="float"), "weights=.* is not supported"),
        (packed() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config=.* is not supported"),
        (GPTQ | {"bits": 3}, "bits=3 is not supported"),
        (GPTQ | {"desc_act": True}, "desc_act=True is not supported; allowed here: false"),
        (GPTQ | {"lm_head": True}, "lm_head=True is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
        (AWQ | {"version": "gemv"}, "version='gemv' is not supported; allowed here: 'gemm'"),
        (AWQ | {"bits": 8}, "bits=8 is not supported; allowed here: 4 bits"),
        (AUTO_ROUND | {"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8' is not supported"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type='mx_fp' is not supported"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits=8 is not supported; allowed here: 16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo='FP8' is not supported"),
        (
            compressed(format="nvfp4-pack-quantized", config_groups={"a": packed_group([], type="float")}),
            "weights=.* is not supported; allowed here: 4 bits of type float in groups of 16",
        ),
        (
            compressed(format="mxfp8-quantized", config_groups={"a": packed_group([], num_bits=8, type="float")}),
            "weights=.* is not supported; allowed here: 8 bits of type float in groups of 32",
        ),
    ],
)
def test_forms_of_four_and_eight_bits_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(config)


MLP, EXPERT = "model.layers.3.mlp.up_proj", "model.layers.3.mlp.experts.7.up_proj"


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (GPTQ | {"dynamic": {"-:.*experts.*": {}, "lm_head": {}}}, EXPERT),
        (GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["self_attn.q_proj"]]}, EXPERT),
        (AWQ | {"modules_to_not_convert": ["mlp.experts"]}, EXPERT),
        (AUTO_ROUND | {"extra_config": {MLP: {"bits": 16, "data_type": "float"}}}, MLP),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.*.mlp.experts*"]}, EXPERT),
        ({"quant_method": "mxfp4"}, MLP),
    ],
)
def test_modules_that_are_left_out(config: dict[str, Any], left_out: str) -> None:
    found = read(config)
    kept = next(name for name in (MLP, EXPERT) if name != left_out)
    assert found.scheme([left_out]) is None and found.scheme([kept]) is not None


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"dynamic": {r"+:.*\.up_proj": {"bits": 8, "group_size": 32}}},
        AUTO_ROUND | {"extra_config": {MLP: {"bits": 8, "group_size": 32}}},
    ],
)
def test_a_module_with_other_bits(config: dict[str, Any]) -> None:
    scheme, other = (read(config).scheme([name]) for name in (MLP, "model.layers.3.self_attn.q_proj"))
    assert scheme is not None and (scheme.form, scheme.group) == ("int8", 32)
    assert other is not None and (other.form, other.group) == ("int4", 128)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed(config_groups={}), "config_groups is missing"),
        (compressed(ignore="lm_head"), "ignore='lm_head' is not valid; expected a list"),
        (compressed(ignore=["re:(["]), r"ignore holds 're:\(\[', which is not a valid pattern"),
        (block(modules_to_not_convert=[1]), r"modules_to_not_convert=\[1\] is not valid"),
    ],
)
def test_what_is_broken_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(config)
