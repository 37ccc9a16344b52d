"""config.json of every architecture, old and new keys, defaults as in transformers, and everything that is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES, make_config
from weft.config.attention import AttentionConfig
from weft.config.checkpoint import read_checkpoint_config
from weft.config.families import FAMILIES
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig
from weft.config.layer_spec import CacheDtypes
from weft.config.model import ModelConfig
from weft.config.moe import ClampedSwiGLU, MoeConfig, SigmoidRouting
from weft.config.rope import RopeConfig
from weft.config.sliding_window import SlidingWindowConfig
from weft.errors import ConfigError, UnsupportedModelError


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    return read_checkpoint_config(write(folder, config))


def tiny(arch: str, **changes: Any) -> dict[str, Any]:
    """The config of a tiny checkpoint as transformers saves it, with keys changed (None removes one)."""
    config = {"architectures": [arch], **json.loads(make_config(arch).to_json_string())}
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    return config


# Published files as they stood when the models came out (numbers of the checkpoints, not all keys).
LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152},
}


def attention(config: ModelConfig) -> AttentionConfig:
    found = config.mixers["full_attention"]["self_attn"]
    assert isinstance(found, AttentionConfig)
    return found


def test_llama_3_1(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_3_1)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert attention(config).rope == RopeConfig(500000.0, 128, "llama3", scaling)
    assert (attention(config).head_dim, config.dtype, config.bos_token_id) == (128, "bfloat16", 128000)
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
    assert config.architecture == "Qwen3_5MoeForConditionalGeneration" and config.model_type == "qwen3_5_moe_text"
    assert attention(config).rope == RopeConfig(1e7, 64)
    assert config.moe == MoeConfig(256, 8, 512, True, 512, frozenset(range(40)))
    assert (config.dtype, config.state_dtype, config.vocab_size) == ("bfloat16", "float32", 248320)
    assert config.eos_token_ids == (248044,) and not config.tie_word_embeddings


READ_BELOW = ("KimiLinearForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM")


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
    eos, bos = (getattr(text, name, None) for name in ("eos_token_id", "bos_token_id"))  # Qwen3-VL's text has none
    assert config.eos_token_ids == (() if eos is None else (eos,)) and config.bos_token_id == bos
    if config.is_hybrid and text.layer_types is not None:
        assert list(config.layer_types) == text.layer_types
        olmo = {"negative_eigenvalues": True, "norm_eps": 1e-5} if arch == "OlmoHybridForCausalLM" else {}
        assert config.mixers["linear_attention"]["linear_attn"] == GatedDeltaNetConfig(
            text.linear_num_key_heads,
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
            text.linear_conv_kernel_dim,
            **olmo,
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
    """As transformers chooses them, whether or not it wrote ``layer_types`` down."""
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


KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 28) if i % 4 and i != 27],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_kimi_linear_as_published_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config = read(tmp_path, KIMI_LINEAR)
    assert config.mixers["linear_attention"]["self_attn"] == KimiDeltaConfig(32, 128, 4)
    assert config.mixers["full_attention"]["self_attn"] == LatentAttentionConfig(32, 128, 64, 128, 512, None)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [3, 7, 11, 15, 19, 23, 26]
    assert config.moe is not None and config.moe.sigmoid == SigmoidRouting(True, 1, 1, 2.446)
    assert (config.moe.shared_expert_intermediate_size, config.moe.sparse_layers) == (1024, frozenset(range(1, 27)))
    reference = transformers.KimiLinearConfig(**{key: value for key, value in KIMI_LINEAR.items() if value is not None})
    written = json.loads(reference.to_json_string())
    assert "linear_attn_config" not in written or written["layer_types"]
    written = {key: value for key, value in written.items() if key != "linear_attn_config"}
    again = read(tmp_path, written | {"architectures": ["KimiLinearForCausalLM"]})
    assert dataclasses.replace(again, model_type="") == config


def test_an_empty_config_of_gemma_3(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": ["Gemma3ForCausalLM"]}), transformers.Gemma3TextConfig()
    assert list(config.layer_types) == reference.layer_types
    for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(reference, key), key
    heads = attention(config)
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (8, 4, reference.head_dim)
    assert heads.scale == reference.query_pre_attn_scalar**-0.5


def test_gpt_oss(tmp_path: Path) -> None:
    """An empty config has transformers' defaults; the published spelling says the same, at its sizes."""
    import transformers

    empty, reference = read(tmp_path, {"architectures": ["GptOssForCausalLM"]}), transformers.GptOssConfig()
    assert list(empty.layer_types) == reference.layer_types
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(empty, key) == getattr(reference, key), key
    swiglu = ClampedSwiGLU(1.702, 7.0)
    all_layers = frozenset(range(36))
    moe = MoeConfig(128, 4, 2880, True, None, all_layers, biases=True, clamped=swiglu, interleaved=True)
    assert empty.moe == moe
    window = empty.mixers["sliding_attention"]["self_attn"]
    assert isinstance(window, SlidingWindowConfig) and window.window == 128
    heads = attention(empty)
    assert window.attention == heads and heads.sinks and heads.qkv_bias and heads.output_bias
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (64, 8, 64)
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    scaling["truncate"] = False
    assert heads.rope == RopeConfig(150000.0, 64, "yarn", scaling)
    types = ["sliding_attention", "full_attention"] * 12
    published = {"num_hidden_layers": 24, "num_local_experts": 32, "experts_per_token": 4, "layer_types": types}
    published |= {"rope_scaling": scaling | {"rope_type": "yarn"}, "rope_theta": 150000, "initial_context_length": 4096}
    config = read(tmp_path, {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 6.0} | published)
    assert config.mixers.as_dicts() == empty.mixers.as_dicts() and config.moe is not None
    assert (config.moe.num_experts, config.moe.clamped) == (32, ClampedSwiGLU(1.702, 6.0))


def test_an_empty_config_of_kimi_linear(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": ["KimiLinearForCausalLM"]}), transformers.KimiLinearConfig()
    assert list(config.layer_types) == reference.layer_types
    assert config.moe is not None and len(config.moe.sparse_layers) == reference.mlp_layer_types.count("sparse")
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, key) == getattr(reference, key), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"mla_use_nope": False}, "mla_use_nope=false is not supported"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"num_expert_group": 3}, "num_expert_group=3 groups"),
        ({"mlp_layer_types": ["dense"]}, "expected 'dense' or 'sparse' for each of 27 layers"),
        ({"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | {"kda_layers": [1]}}, "each of the layers 1 to 27"),
    ],
)
def test_what_kimi_linear_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, KIMI_LINEAR | changes)


def test_gemma_3_as_published_and_as_transformers_writes_it(tmp_path: Path) -> None:
    old = tiny("Gemma3ForCausalLM", rope_parameters=None, layer_types=None, sliding_window_pattern=2)
    old |= {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"factor": 4.0, "rope_type": "linear"}}
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    types = ["sliding_attention", "full_attention"] * 2
    config = read(tmp_path, tiny("Gemma3ForCausalLM", rope_parameters=nested, layer_types=types))
    assert read(tmp_path, old) == config
    window = config.mixers["sliding_attention"]["self_attn"]
    assert isinstance(window, SlidingWindowConfig) and window.window == 20
    assert (window.attention.rope.theta, window.attention.rope.scaling) == (2e4, "default")  # type: ignore[union-attr]
    assert attention(config).rope == RopeConfig(5e5, 16, "linear", {"factor": 4.0})
    assert attention(config).scale == 24**-0.5 and config.multipliers.embedding == 48**0.5
    assert set(config.norm_placement.values()) == {"sandwich"} and config.zero_centered_norm


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
    ],
)
def test_what_gemma_3_does_not_do_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        read(tmp_path, tiny("Gemma3ForCausalLM", **changes))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        (
            "Qwen3ForCausalLM",
            {"quantization_config": {"quant_method": "awq"}},
            r"quant_method='awq' is not supported; supported are fp8",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "'sliding_attention', which is not",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["linear_attention"] * 2},
            "'linear_attention', which is not supported for",
        ),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is 'silu'"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "'dynamic' is not supported; supported are",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {}}}, "separate rotary settings per layer type"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this"),
        ("Qwen3NextForCausalLM", {"head_dim": 12}, "gives a rotary dimension of 3; it must be even"),
        ("Qwen3NextForCausalLM", {"head_dim": 4}, "gives a rotary dimension of 1"),
        ("Qwen3NextForCausalLM", {"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        ("Qwen3NextForCausalLM", {"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype='float16' is not supported"),
        ("Qwen3_5MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
        (
            "Qwen3ForCausalLM",
            {"dtype": "float8_e4m3fn"},
            "dtype='float8_e4m3fn' is not supported; supported are float32",
        ),
    ],
)
def test_unsupported_values(arch: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, tiny(arch, **changes))


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds 'sliding_attention', but use_sliding_window is false",
        ),
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 3},
            "num_attention_heads=4 is not divisible by num_key_value_heads=3",
        ),
        (
            "LlamaForCausalLM",
            {"head_dim": None, "hidden_size": 50},
            "hidden_size=50 is not divisible by num_attention_heads=4",
        ),
        ("LlamaForCausalLM", {"hidden_size": 0}, "hidden_size=0 is not valid; expected an integer of at least 1"),
        ("LlamaForCausalLM", {"hidden_size": "big"}, "hidden_size='big' is not valid"),
        ("LlamaForCausalLM", {"vocab_size": True}, "vocab_size=True is not valid"),
        ("LlamaForCausalLM", {"rms_norm_eps": -1}, "rms_norm_eps=-1 is not valid; expected a number above 0"),
        ("LlamaForCausalLM", {"rope_theta": 0, "rope_parameters": None}, "rope_theta=0 is not valid"),
        ("LlamaForCausalLM", {"rope_scaling": [1]}, r"rope_scaling=\[1\] is not valid; expected an object"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "linear"}},
            r"\(rope_scaling\): required key 'factor' is missing",
        ),
        (
            "LlamaForCausalLM",
            {"tie_word_embeddings": "no"},
            "tie_word_embeddings='no' is not valid; expected true or false",
        ),
        ("LlamaForCausalLM", {"eos_token_id": -1}, "eos_token_id=-1 is not valid"),
        (
            "LlamaForCausalLM",
            {"layer_types": ["full_attention"] * 3},
            "layer_types has 3 entries but num_hidden_layers=2",
        ),
        ("LlamaForCausalLM", {"layer_types": "full_attention"}, "expected a list with one entry per layer"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is greater than num_experts=5"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [2]}, "expected layer indices below num_hidden_layers=2"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not divisible by"),
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 is not valid"),
        ("Qwen3_5ForConditionalGeneration", {"text_config": None}, "needs a text_config object, which is missing"),
        ("LlamaForCausalLM", {"architectures": []}, r"architectures=\[\] is not a list with one class name"),
        ("LlamaForCausalLM", {"architectures": None}, "architectures=None is not a list"),
    ],
)
def test_inconsistent_numbers(arch: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, tiny(arch, **changes))


def test_unknown_architectures_list_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, {"architectures": ["GPT2LMHeadModel"]})
    assert all(name in str(error.value) for name in ("GPT2LMHeadModel", *FAMILIES))
    assert {*ARCHITECTURES, *MAMBA_ARCHITECTURES} == set(FAMILIES)


BROKEN = [
    (b"", "is not valid JSON"),
    (b'{"architectures": ["Llama', "is not valid JSON .*truncated"),
    (b"[1, 2]", "holds a JSON list, not an object"),
    (b'"text"', "holds a JSON str, not an object"),
    (b"\xff\xfe\x00", "is not UTF-8 text"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_broken_config_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json {message}"):
        read_checkpoint_config(tmp_path)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        read_checkpoint_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        read_checkpoint_config(tmp_path)


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path, QWEN3_NEXT)
    code = (
        "import sys; from pathlib import Path; from weft.config.checkpoint import read_checkpoint_config; "
        f"read_checkpoint_config(Path({str(tmp_path)!r})); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
