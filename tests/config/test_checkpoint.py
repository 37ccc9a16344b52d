"""config.json of every architecture: old and new keys, defaults as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.published import LLAMA_3_1, QWEN3_5_MOE, QWEN3_NEXT, attention, read, tiny
from tests.tiny import ARCHITECTURES, make_config
from weft.config.gated_delta_net import GatedDeltaNetConfig, InProjLayout
from weft.config.layer_spec import CacheDtypes
from weft.config.moe import MoeConfig
from weft.config.rope import RopeConfig


def test_llama_3_1(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_3_1)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert attention(config).rope == RopeConfig(500000.0, 128, "llama3", scaling)
    assert (attention(config).head_dim, config.dtype) == (128, "bfloat16")
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert not config.is_hybrid and not attention(config).qk_norm
    assert not config.zero_centered_norm and config.moe is None
    assert config.layer_types == ("full_attention",) * 32


def test_qwen3_next(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT)
    assert config.mixers["linear_attention"]["linear_attn"] == GatedDeltaNetConfig(16, 32, 128, 128, 4)
    assert config.moe == MoeConfig(512, 10, 512, True, 512, frozenset(range(48)))
    assert attention(config).rope == RopeConfig(1e7, 64)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == list(range(3, 48, 4))
    assert attention(config).qk_norm and attention(config).output_gate and config.zero_centered_norm
    assert config.state_dtype is None and config.eos_token_ids == (151645,)


def test_qwen3_5_moe_multimodal(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_5_MOE)
    assert config.architecture == "Qwen3_5MoeForConditionalGeneration"
    assert attention(config).rope == RopeConfig(1e7, 64)
    assert config.moe == MoeConfig(256, 8, 512, True, 512, frozenset(range(40)))
    assert (config.dtype, config.state_dtype, config.vocab_size) == ("bfloat16", "float32", 248320)
    assert config.eos_token_ids == (248044,) and not config.tie_word_embeddings


READ_BELOW = (
    "Lfm3ForCausalLM",
    "RecurrentGemmaForCausalLM",
    "KimiLinearForCausalLM",
    "BailingHybridForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "ZayaForCausalLM",
    "InklingForCausalLM",
    "Inkling2ForCausalLM",
)


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a not in READ_BELOW])
def test_an_empty_config_has_transformers_defaults(arch: str, tmp_path: Path) -> None:
    """Every derived number equals what the transformers configuration class says for a file without keys."""
    import transformers

    class_name = type(make_config(arch)).__name__
    reference: Any = getattr(transformers, class_name)()
    multimodal = arch.endswith("ForConditionalGeneration")
    needed = {"text_config": {}} if multimodal else {"sliding_window": None} if arch == "MistralForCausalLM" else {}
    config = read(tmp_path, {"architectures": [arch], **needed})
    text = reference.text_config if multimodal else reference
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        assert getattr(config, key) == getattr(text, key), key
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.rms_norm_eps == (text.norm_eps if arch.startswith("Lfm2") else text.rms_norm_eps)
    heads = attention(config)
    assert (heads.num_heads, heads.num_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    biases = (getattr(text, "attention_bias", False),) * 2
    assert (heads.qkv_bias, heads.output_bias) == ((True, False) if arch.startswith("Qwen2") else biases)
    head_dim = getattr(text, "head_dim", text.hidden_size // text.num_attention_heads)
    assert heads.head_dim == head_dim
    if arch == "Lfm2ForCausalLM":
        assert config.intermediate_size == 8192  # two thirds of 12,288
    elif "Qwen3_5Moe" not in arch:
        assert config.intermediate_size == text.intermediate_size
    assert config.max_position_embeddings == text.max_position_embeddings
    assert heads.rope.theta == text.rope_parameters["rope_theta"]
    assert heads.rope.rotary_dim == int(head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0))
    eos = getattr(text, "eos_token_id", None)  # Qwen3-VL's text has none
    assert config.eos_token_ids == (() if eos is None else (eos,))
    if config.is_hybrid and text.layer_types is not None:
        assert list(config.layer_types) == text.layer_types
        stored = InProjLayout.GROUPED if arch == "Qwen3NextForCausalLM" else InProjLayout.SEPARATE
        own: dict[str, Any] = {"in_proj": stored}
        if arch == "OlmoHybridForCausalLM":
            own = {"negative_eigenvalues": True, "norm_eps": 1e-5, "in_proj": InProjLayout.SINGLE}
        assert config.mixers["linear_attention"]["linear_attn"] == GatedDeltaNetConfig(
            text.linear_num_key_heads,
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
            text.linear_conv_kernel_dim,
            **own,
        )
    if config.moe is not None:
        assert config.moe.num_experts == text.num_experts
        assert config.moe.num_experts_per_tok == text.num_experts_per_tok
        assert config.moe.intermediate_size == text.moe_intermediate_size
        assert config.moe.norm_topk_prob == getattr(text, "norm_topk_prob", True)
        assert config.moe.shared_expert_intermediate_size == getattr(text, "shared_expert_intermediate_size", None)


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_old_and_new_keys_mean_the_same(arch: str, tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    partial = {} if arch == "LlamaForCausalLM" else {"partial_rotary_factor": 0.5}
    new = tiny(arch, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **scaling, **partial}, dtype="float16")
    old = tiny(arch, rope_parameters=None, dtype=None, layer_types=None, rope_theta=5000.0, torch_dtype="float16")
    old |= {"rope_scaling": {"type": "yarn", **scaling}, "full_attention_interval": 4, **partial}
    assert read(tmp_path, old) == read(tmp_path, new)


def test_yarn_numbers_are_filled_in(tmp_path: Path) -> None:
    config = read(
        tmp_path, tiny("Qwen3ForCausalLM", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2})
    )
    assert attention(config).rope.parameters == {
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }


def test_which_of_two_values_counts(tmp_path: Path) -> None:
    """Rotary settings go before the keys of older files, but for the original context; a text config before the file's
    own keys, which count where it is silent."""
    rope = {"rope_type": "linear", "type": "yarn", "factor": 2.0, "rope_theta": 5e3, "partial_rotary_factor": 0.5}
    values = tiny("Qwen3NextForCausalLM", rope_parameters=rope, rope_theta=1e6, partial_rotary_factor=0.25)
    assert attention(read(tmp_path, values)).rope == RopeConfig(5e3, 8, "linear", {"factor": 2.0})
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 128, "mscale_all_dim": 0.0}
    values = tiny("Qwen3ForCausalLM", rope_parameters=yarn, original_max_position_embeddings=64)
    found = attention(read(tmp_path, values)).rope.parameters
    assert (found["factor"], found["original_max_position_embeddings"], found["mscale_all_dim"]) == (8.0, 64, 0.0)
    values = tiny("Qwen3_5ForConditionalGeneration", dtype="bfloat16", eos_token_id=5)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    values["text_config"] |= {"dtype": "torch.float16", "eos_token_id": [7, 8], "quantization_config": fp8}
    config = read(tmp_path, values)
    assert (config.dtype, config.eos_token_ids) == ("float16", (7, 8))
    assert config.quantization is not None and config.quantization.main.weights == "block"


@pytest.mark.parametrize(
    ("arch", "changes", "expected"),
    [
        ("Qwen3NextForCausalLM", {}, {"mtp_layers": 1}),
        ("Qwen3NextForCausalLM", {"num_nextn_predict_layers": 2}, {"mtp_layers": 2}),
        ("Qwen3NextForCausalLM", {"mtp_use_dedicated_embeddings": True}, {"mtp_layers": 0}),
        (
            "Lfm2ForCausalLM",
            {"intermediate_size": 64, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 1},
            {"intermediate_size": 63},
        ),
        (
            "OlmoHybridForCausalLM",
            {"layer_types": None, "num_hidden_layers": 2},
            {"layer_types": ("linear_attention", "full_attention")},
        ),
    ],
)
def test_numbers_that_follow(arch: str, changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, tiny(arch, **changes))
    assert {name: getattr(config, name) for name in expected} == expected


def test_new_name_of_the_expert_count(tmp_path: Path) -> None:
    config = read(tmp_path, tiny("Qwen3MoeForCausalLM", num_experts=None, num_local_experts=9))
    assert config.moe is not None and config.moe.num_experts == 9


def test_sparse_layers(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = read(tmp_path, tiny("Qwen3MoeForCausalLM", **changes))
    assert config.moe is not None and config.moe.sparse_layers == {1, 5}


def test_tying_of_the_published_multimodal_layout_is_the_top_level_one(tmp_path: Path) -> None:
    config = tiny("Qwen3_5ForConditionalGeneration", tie_word_embeddings=True)
    config["text_config"]["tie_word_embeddings"] = False
    assert read(tmp_path, config).tie_word_embeddings
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    assert read(tmp_path, config).tie_word_embeddings


def test_unused_sliding_window_and_unknown_keys_are_fine(tmp_path: Path) -> None:
    changes = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1, "something_new": {"a": 1}}
    assert read(tmp_path, tiny("Qwen3ForCausalLM", **changes)).is_hybrid is False
    assert read(tmp_path, tiny("Qwen3ForCausalLM", sliding_window=4096, use_sliding_window=True, max_window_layers=2))


@pytest.mark.parametrize(
    ("arch", "changes", "layers"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, [0, 1, 2, 3]),
        ("MistralForCausalLM", {"sliding_window": 512}, []),  # no context outgrows it
        ("MistralForCausalLM", {"sliding_window": None}, []),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [1, 2, 3]),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, []),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, []),
        ("Qwen3MoeForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, [0, 1, 2, 3]),
        ("Qwen2MoeForCausalLM", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, [0, 2]),
    ],
)
def test_layers_with_a_window(arch: str, changes: dict[str, Any], layers: list[int], tmp_path: Path) -> None:
    """Layers with a window must be those of transformers, whether or not the config holds ``layer_types``."""
    dense = {"mlp_only_layers": []} if "Moe" in arch else {}
    reference = make_config(arch, num_hidden_layers=4, **dense, **changes)
    written = {"architectures": [arch], **json.loads(reference.to_json_string())}
    if changes.get("use_sliding_window"):
        written |= changes  # transformers drops what it does not use
    for config in (written, {key: value for key, value in written.items() if key != "layer_types"}):
        model = read(tmp_path, config)
        specs = model.layer_specs(CacheDtypes())
        assert [i for i in range(4) if specs[f"model.layers.{i}.self_attn"].states] == layers
    theirs = getattr(reference, "layer_types", None)
    if theirs is not None:
        assert [i for i, kind in enumerate(theirs) if kind == "sliding_attention"] == layers
