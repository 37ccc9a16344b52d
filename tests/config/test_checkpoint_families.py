"""config.json of Kimi-Linear, Gemma 3 and gpt-oss: as published, as transformers writes it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.published import attention, read, tiny
from weft.config.attention import AttentionConfig
from weft.config.convolutional_attention import ConvolutionalAttentionConfig
from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig
from weft.config.model import Multipliers
from weft.config.moe import ClampedSwiGLU, MoeConfig, SigmoidRouting
from weft.config.recurrent_gemma import RgLruConfig
from weft.config.rope import RopeConfig
from weft.config.short_conv import ShortConvConfig
from weft.config.sliding_window import SlidingWindowConfig
from weft.errors import ConfigError, UnsupportedModelError

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
    assert again == config


def test_numbers_of_kimi_linear_that_are_not_the_defaults(tmp_path: Path) -> None:
    delta = KIMI_LINEAR["linear_attn_config"] | {"num_heads": 16, "head_dim": 64, "short_conv_kernel_size": 3}
    other = {"first_k_dense_replace": 2, "num_shared_experts": 0, "linear_attn_config": delta}
    config = read(tmp_path, KIMI_LINEAR | other)
    assert config.mixers["linear_attention"]["self_attn"] == KimiDeltaConfig(16, 64, 3)
    moe = config.moe
    assert moe is not None and moe.sparse_layers == frozenset(range(2, 27))
    assert moe.shared_expert_intermediate_size is None


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


LFM3 = "Lfm3ForCausalLM"


def test_lfm3_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": [LFM3]}), transformers.Lfm3Config()
    assert list(config.layer_types) == reference.layer_types and config.tie_word_embeddings
    for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"):
        assert getattr(config, key) == getattr(reference, key), key
    assert config.rms_norm_eps == reference.norm_eps and set(config.norm_placement.values()) == {"sandwich"}
    assert config.mixers["conv"]["conv"] == ShortConvConfig(2048, 7, False)
    rope = RopeConfig(1e6, 128, "proportional", {"angles": 32, "factor": 1.0})
    full = AttentionConfig(16, 4, 128, rope, qk_norm=True, head_gate=True)
    assert attention(config) == full
    window = SlidingWindowConfig(dataclasses.replace(full, rope=RopeConfig(1e4, 128)), 256)
    assert config.mixers["sliding_attention"]["self_attn"] == window
    written = json.loads(reference.to_json_string())
    assert read(tmp_path, written | {"architectures": [LFM3]}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sandwich_norm": False}, "use_sandwich_norm=False is not supported"),
        ({"rope_parameters": {"rope_theta": 5e3}}, "an object with an entry 'full_attention'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "a share of head_dim=16 that is at least one pair",
        ),
    ],
)
def test_what_lfm3_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, tiny(LFM3, **changes))


ZAYA = "ZayaForCausalLM"


def test_zaya_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    """Published files have a rotary type beside the settings of each layer type."""
    import transformers

    config, reference = read(tmp_path, {"architectures": [ZAYA]}), transformers.ZayaConfig()
    assert list(config.layer_types) == reference.layer_types and config.tie_word_embeddings
    for key in ("vocab_size", "hidden_size", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(config, key) == getattr(reference, key), key
    heads = AttentionConfig(8, 2, 128, RopeConfig(5e6, 64))
    assert config.mixers["hybrid"]["self_attn"] == ConvolutionalAttentionConfig(heads, 2, 2)
    experts = MoeConfig(16, 1, 2048, False, None, frozenset(range(40)), router_size=256)
    assert config.moe == experts and experts.num_classes == 17
    written = json.loads(reference.to_json_string()) | {"architectures": [ZAYA]}
    assert read(tmp_path, written) == config
    both = written["rope_parameters"] | {"rope_type": "default"}
    assert read(tmp_path, written | {"rope_parameters": both}) == config
    windows = read(tmp_path, {"architectures": [ZAYA], "layer_types": ["hybrid_sliding"], "num_hidden_layers": 1,
                              "sliding_window": 64})  # fmt: skip
    slow = dataclasses.replace(heads, rope=RopeConfig(1e4, 64))
    assert windows.mixers["hybrid_sliding"]["self_attn"] == ConvolutionalAttentionConfig(slow, 2, 2, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head_bias": True}, "lm_head_bias=True is not supported; set it to false"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported for this architecture; supported is 1"),
        ({"rope_parameters": {"rope_theta": 5e3}}, "an object with an entry 'hybrid'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "use rope_parameters, with one entry per type"),
        ({"num_key_value_heads": 1, "head_dim": 15}, "an even number of value channels"),
        ({"sliding_window": None}, "required key 'sliding_window' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_what_zaya_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, tiny(ZAYA, **changes))


def test_ranks_keep_query_heads_with_their_key_head(tmp_path: Path) -> None:
    mixer = read(tmp_path, tiny(ZAYA)).mixers["hybrid"]["self_attn"]
    mixer.check_shares(2)
    with pytest.raises(ConfigError, match=r"num_key_value_heads .whose query heads stay together.=2 is not divisible"):
        mixer.check_shares(4)


LING = "BailingHybridForCausalLM"


def test_ling_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": [LING]}), transformers.BailingHybridConfig()
    assert list(config.layer_types) == reference.layer_types and config.mtp_layers == 1
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, key) == getattr(reference, key), key
    assert config.mixers["linear_attention"]["self_attn"] == KimiDeltaConfig(32, 128, 4, -5.0, low_rank=False)
    rope = RopeConfig(6e6, 64)
    latent = LatentAttentionConfig(32, 128, 64, 128, 512, None, rope, output_gate=True)
    assert config.mixers["full_attention"]["self_attn"] == latent
    moe = config.moe
    assert moe is not None and moe.sigmoid == SigmoidRouting(True, 8, 4, 2.5)
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (512, 8, 768)
    assert moe.sparse_layers == frozenset(range(2, 42))
    written = json.loads(reference.to_json_string())
    assert written["head_dim"] == 64, "transformers overwrites the size of a head"
    assert read(tmp_path, written | {"architectures": [LING]}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_lower_bound": 1.0}, "kda_lower_bound=1.0 is not valid"),
        ({"q_lora_rank": 8}, "q_lora_rank=8 is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "supported is the default rotary embedding"),
        ({"mtp_layer_types": ["linear_attention"]}, "mtp_layer_types=.* is not supported"),
        ({"mtp_mlp_layer_types": ["dense"]}, "mtp_mlp_layer_types=.* is not supported"),
    ],
)
def test_what_ling_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, tiny(LING, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"mla_use_nope": False}, "mla_use_nope=false is not supported"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"num_expert_group": 3}, "num_expert_group=3 groups"),
        ({"num_expert_group": 32, "num_experts_per_token": 9}, "with num_experts_per_token=9"),
        ({"mlp_layer_types": ["dense"]}, "expected 'dense' or 'sparse' for each of 27 layers"),
        ({"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | {"kda_layers": [1]}}, "each of the layers 1 to 27"),
        (
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [*range(1, 28)]}},
            "each of the layers 1 to 27",
        ),
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


RECURRENT_GEMMA = "RecurrentGemmaForCausalLM"


def test_recurrent_gemma_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": [RECURRENT_GEMMA]}), transformers.RecurrentGemmaConfig()
    assert list(config.layer_types) == reference.layers_block_type and config.tie_word_embeddings
    for key in ("vocab_size", "hidden_size", "rms_norm_eps", "num_hidden_layers"):
        assert getattr(config, key) == getattr(reference, key), key
    assert config.intermediate_size == reference.intermediate_size // 2
    assert config.mixers["linear_attention"]["recurrent"] == RgLruConfig(2560, 10, 4)
    heads = AttentionConfig(10, 10, 256, RopeConfig(1e4, 128), output_bias=True)
    assert config.mixers["sliding_attention"]["self_attn"] == SlidingWindowConfig(heads, 2048)
    assert config.multipliers == Multipliers(embedding=50.5, logits_cap=30.0)  # of 50.596, in bfloat16
    assert config.mlp_bias and config.zero_centered_norm
    written = json.loads(reference.to_json_string())
    assert read(tmp_path, written | {"architectures": [RECURRENT_GEMMA]}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_types": ["recurrent", "mamba"]}, "a list of 'recurrent' and 'attention'"),
        ({"lru_width": 74}, "lru_width=74 is not divisible by num_attention_heads=4"),
        ({"hidden_activation": "gelu"}, "supported is 'gelu_pytorch_tanh'"),
    ],
)
def test_what_recurrent_gemma_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, tiny(RECURRENT_GEMMA, **changes))
