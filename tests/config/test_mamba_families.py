"""Configs of the families with Mamba layers: defaults, both spellings, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.tiny import MAMBA_ARCHITECTURES, make_config
from weft.config.attention import AttentionConfig
from weft.config.checkpoint import read_checkpoint_config
from weft.config.layer_spec import CacheDtypes
from weft.config.mamba import MambaConfig
from weft.config.mamba2 import Mamba2Config
from weft.config.model import ModelConfig, Multipliers
from weft.config.shared_block import SharedBlockConfig
from weft.errors import ConfigError, UnsupportedModelError


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_checkpoint_config(folder)


def tiny(arch: str, **changes: Any) -> dict[str, Any]:
    """The tiny config as it is stored; None takes a key out."""
    stored = json.loads(make_config(arch).to_json_string(use_diff=False)) | {"architectures": [arch]} | changes
    return {key: value for key, value in stored.items() if key not in changes or value is not None}


ZAMBA2 = "Zamba2ForCausalLM"


@pytest.mark.parametrize("arch", MAMBA_ARCHITECTURES)
def test_an_empty_config_has_transformers_defaults(arch: str, tmp_path: Path) -> None:
    """But for names and token ids, which say nothing of the computation; and layers, where files always name them."""
    default = getattr(transformers, type(make_config(arch)).__name__)()
    stored = json.loads(default.to_json_string(use_diff=False)) | {"architectures": [arch]}
    needed = ("layers_block_type",) if arch == "NemotronHForCausalLM" else ("mamba_d_ssm",)
    empty = {"architectures": [arch]} | {key: stored[key] for key in needed if key in stored}
    full, bare = (dataclasses.replace(read(tmp_path, values), max_position_embeddings=1) for values in (stored, empty))
    assert bare == full


def test_nemotron_pattern(tmp_path: Path) -> None:
    stored = tiny("NemotronHForCausalLM", layers_block_type=None)
    old = read(tmp_path, stored | {"hybrid_override_pattern": "M-*EM", "num_hidden_layers": 5})
    assert old == read(tmp_path, tiny("NemotronHForCausalLM"))
    assert old.layers_without_mlp == {0, 2, 4} and old.activation == "relu2"
    assert old.moe is not None and old.moe.sparse_layers == {3}
    mamba, attention = (next(iter(old.mixers[kind].values())) for kind in ("linear_attention", "full_attention"))
    assert isinstance(mamba, Mamba2Config) and mamba.dt_limit == (0.001, math.inf)
    assert isinstance(attention, AttentionConfig) and attention.rope is None
    mamba = read(tmp_path, stored | {"layers_block_type": ["mamba"], "mamba_dt_min": 0.4}).mixers["linear_attention"]
    assert mamba["mamba"].dt_limit == (0.4, math.inf)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="5 letters of"):
        read(tmp_path, stored | {"hybrid_override_pattern": "M-*X-", "num_hidden_layers": 5})


def test_published_names_of_layer_types(tmp_path: Path) -> None:
    new = read(tmp_path, tiny("GraniteMoeHybridForCausalLM"))
    layers = ["mamba", "mamba", "attention", "mamba"]
    assert read(tmp_path, tiny("GraniteMoeHybridForCausalLM", layer_types=layers)) == new
    assert new.multipliers == Multipliers(1.5, 0.4, 1 / 1.3)
    assert new.residual_norm_eps == pytest.approx(1e-6 / 0.16)


def test_zamba2_as_published(tmp_path: Path) -> None:
    """Layer types by their earlier names; the block of each layer; two thirds of a block's uses store nothing."""
    config = read(tmp_path, tiny(ZAMBA2))
    older = ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"]
    assert read(tmp_path, tiny(ZAMBA2, layers_block_type=older)) == config
    block = config.mixers["hybrid"]["shared_block"]
    assert isinstance(block, SharedBlockConfig) and block.layers == (1, 3, 4)
    assert [block.owner_of(layer) for layer in block.layers] == [1, 3, 1]
    assert block.attention.scale == 12**-0.5 and block.attention.input_size == 96
    spec = block.layer_spec(48, CacheDtypes())
    assert spec.num_reused_weights == (96 * 96 * 3 + 48 * 96 + 3 * 48 * 56) / 3


def test_published_keys_of_minimax(tmp_path: Path) -> None:
    factors = {key: None for key in tiny("MiniMaxForCausalLM") if key.endswith("_factor")}
    published = {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [0, 0, 1, 0],
        "layernorm_full_attention_alpha": 1.3,
        "layernorm_full_attention_beta": 0.9,
        "layernorm_linear_attention_alpha": 1.4,
        "layernorm_linear_attention_beta": 0.8,
        "layernorm_mlp_alpha": 1.2,
        "layernorm_mlp_beta": 1.1,
        "postnorm": True,
        "shared_intermediate_size": 0,
    }
    stored = tiny("MiniMaxForCausalLM", layer_types=None, **factors)
    assert read(tmp_path, stored | published) == read(tmp_path, tiny("MiniMaxForCausalLM"))
    half = read(tmp_path, stored | published | {"rotary_dim": 8}).mixers["full_attention"]["self_attn"]
    assert isinstance(half, AttentionConfig) and half.rope is not None and half.rope.rotary_dim == 8


def test_time_step_limits(tmp_path: Path) -> None:
    """Infinity as JSON has it by itself, and as transformers writes it."""
    for high in (math.inf, {"__float__": "Infinity"}):
        config = read(tmp_path, tiny("BambaForCausalLM", time_step_limit=[0.5, high]))
        mamba = config.mixers["linear_attention"]["mamba"]
        assert isinstance(mamba, Mamba2Config) and mamba.dt_limit == (0.5, math.inf)


def test_jamba_periods_and_automatic_rank(tmp_path: Path) -> None:
    config = read(tmp_path, tiny("JambaForCausalLM", mamba_dt_rank="auto"))
    assert config.layer_types == ("linear_attention", "full_attention", "linear_attention", "linear_attention")
    assert config.moe is not None and config.moe.sparse_layers == {1, 3} and not config.moe.norm_topk_prob
    mamba = config.mixers["linear_attention"]["mamba"]
    assert isinstance(mamba, MambaConfig) and (mamba.dt_rank, mamba.num_channels) == (3, 96)


@pytest.mark.parametrize(
    ("arch", "changes", "error", "message"),
    [
        ("BambaForCausalLM", {"mamba_n_groups": 4}, ConfigError, "mamba_n_heads=6 is not divisible"),
        ("BambaForCausalLM", {"mamba_d_head": 15}, ConfigError, "mamba_expand \\* hidden_size=96 is not"),
        ("BambaForCausalLM", {"time_step_limit": [1.0, 0.5]}, ConfigError, "the smaller one first"),
        ("BambaForCausalLM", {"time_step_limit": [1.0]}, ConfigError, "a list of 2 numbers"),
        ("BambaForCausalLM", {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ("NemotronHForCausalLM", {"mamba_hidden_act": "gelu"}, UnsupportedModelError, "mamba_hidden_act='gelu'"),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, UnsupportedModelError, "supported is 'relu2'"),
        (
            "NemotronHForCausalLM",
            {"moe_latent_size": 8, "mlp_bias": True},
            UnsupportedModelError,
            "mlp_bias=True is not supported with moe_latent_size",
        ),
        ("NemotronHForCausalLM", {"n_group": 4}, ConfigError, "n_group=4 is not valid"),
        ("NemotronHForCausalLM", {"num_experts_per_tok": 5}, ConfigError, "that leaves 5 in topk_group groups"),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, UnsupportedModelError, "'rope' and"),
        ("JambaForCausalLM", {"attn_layer_offset": 3}, ConfigError, "below attn_layer_period=3"),
        ("ZambaForCausalLM", {"n_mamba_heads": 5}, ConfigError, "a divisor of the 96 channels"),
        ("ZambaForCausalLM", {"hidden_mamba_act": "gelu"}, UnsupportedModelError, "hidden_mamba_act='gelu'"),
        ("ZambaForCausalLM", {"tie_word_embeddings": False}, UnsupportedModelError, "with shared blocks"),
        (ZAMBA2, {"use_long_context": True}, UnsupportedModelError, "set it to false to serve the original"),
        (ZAMBA2, {"tie_word_embeddings": False}, UnsupportedModelError, "with shared blocks; set it to true"),
        (ZAMBA2, {"num_key_value_heads": 2}, UnsupportedModelError, "with adapters; supported is 4"),
        (ZAMBA2, {"attention_hidden_size": 48}, UnsupportedModelError, "supported is twice hidden_size, 96"),
        (ZAMBA2, {"attention_head_dim": 12}, UnsupportedModelError, "supported is twice hidden_size / num_"),
        (ZAMBA2, {"num_attention_heads": 5}, ConfigError, "a divisor of twice hidden_size, 96"),
        (ZAMBA2, {"use_conv_bias": False}, UnsupportedModelError, "use_conv_bias=False"),
        (ZAMBA2, {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedModelError, "supported is 'gelu'"),
        (ZAMBA2, {"layers_block_type": None}, ConfigError, "expected 54, or layers_block_type"),
        ("MiniMaxForCausalLM", {"sliding_window": 8}, UnsupportedModelError, "sliding_window=8"),
        ("MiniMaxForCausalLM", {"postnorm": False}, UnsupportedModelError, "postnorm=false"),
        ("MiniMaxForCausalLM", {"shared_intermediate_size": 9}, UnsupportedModelError, "a shared expert"),
    ],
)
def test_refusals(arch: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, tiny(arch, **changes))


def test_specs_count_bytes_and_work(tmp_path: Path) -> None:
    """By hand: two projections and the convolution, two states, a model without KV."""
    config = read(tmp_path, tiny("Mamba2ForCausalLM"))
    spec = config.layer_specs(CacheDtypes(model="bfloat16", state="float32"))["model.layers.0.mamba"]
    assert spec.slot_bytes == 144 * 3 * 2 + 6 * 12 * 16 * 4 and spec.token_bytes == 0
    assert spec.num_weights == 48 * (96 + 144 + 6) + 96 * 48 + 144 * 4
    assert spec.on_rank(2).slot_bytes == spec.slot_bytes / 2
