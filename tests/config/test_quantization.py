"""What a ``quantization_config`` says, which modules it names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fp8_checkpoints import SCHEMES, quantization_config
from weft.config.json_object import JsonObject
from weft.config.quantization import ONLINE, QuantizationConfig, read_quantization
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
    assert [(c.weights, c.activations) for c in found] == [
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
    assert read(block(modules_to_not_convert=[entry])).quantizes([name]) is not matches
    assert read(block(modules_to_not_convert=None, ignored_layers=[entry])).quantizes([name]) is not matches


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
    assert read(compressed(ignore=[entry])).quantizes([name]) is not matches


def test_targets_by_pattern() -> None:
    config = compressed(ignore=[])
    first = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = first | {"targets": ["model.layers.0.self_attn.q_proj"]}
    first["targets"] = ["re:.*mlp.*"]
    found = read(config)
    assert found.quantizes([GATE_PROJ]) and found.quantizes(["model.layers.0.self_attn.q_proj"])
    assert not found.quantizes(["model.layers.0.self_attn.k_proj"])


def test_any_published_name_counts() -> None:
    names = ["model.layers.0.mlp.gate_proj", "model.language_model.layers.0.mlp.gate_proj"]
    assert not read(block(modules_to_not_convert=[names[1]])).quantizes(names)
    assert read(block()).quantizes(names) and ONLINE.quantizes(names)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, r"quant_method='awq' is not supported; supported are fp8 .*--quantization fp8"),
        ({"quant_method": "mxfp4"}, r"'mxfp4' is not supported; use the checkpoint in bfloat16: .*dequantize=True"),
        ({"quant_method": "gptq"}, "quant_method='gptq' is not supported"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
        ({}, "quant_method=None is not supported"),
        (block(fmt="e5m2"), "fmt='e5m2' is not supported"),
        (block(weight_block_size=[64, 128]), r"weight_block_size=\[64, 128\] is not supported"),
        (block(weight_block_size=None), "weight_block_size=None is not supported"),
        (block(activation_scheme="static"), "activation_scheme='static' is not supported"),
        (block(scale_fmt="ue8m0"), "scale_fmt='ue8m0' is not supported"),
        (compressed(format="pack-quantized"), "format='pack-quantized' is not supported"),
        (compressed(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized' is not supported"),
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
    config = compressed()
    config["config_groups"]["group_1"] = quantization_config("tensor-token")["config_groups"]["group_0"]
    with pytest.raises(UnsupportedModelError, match="groups of different schemes are not supported"):
        read(config)


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
