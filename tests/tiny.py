"""Tiny random checkpoints of every supported architecture, saved by transformers.

Job: ``make_checkpoint`` writes a folder that looks like a published one, with a few thousand random parameters.
Does not know: Weft.
"""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

ARCHITECTURES = (
    "BailingHybridForCausalLM",
    "Gemma3ForCausalLM",
    "Glm5NextForConditionalGeneration",
    "GptOssForCausalLM",
    "Inkling2ForCausalLM",
    "InklingForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OlmoHybridForCausalLM",
    "RecurrentGemmaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "ZayaForCausalLM",
)
MAMBA_ARCHITECTURES = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "NemotronHForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
)
"""Architectures with Mamba layers."""

_BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # larger ones make the reference itself miss float64 by more than 1e-4
}
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "conv", "full_attention"],
    "norm_eps": 1e-6,
    "block_multiple_of": 8,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LFM3 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    "sliding_window": 20,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_RECURRENT_GEMMA = {
    "num_hidden_layers": 4,
    "intermediate_size": 112,
    "num_key_value_heads": 1,
    "lru_width": 72,
    "attention_window_size": 20,
    "conv1d_width": 3,
    "logits_soft_cap": 2.5,
    "block_types": ["recurrent", "attention"],
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MAMBA2_LAYER = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_BAMBA = _MAMBA2_LAYER | _NO_TOKENS | {"num_hidden_layers": 4, "attn_layer_indices": [2], "rms_norm_eps": 1e-6}
_GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.3,
}
_FALCON_H1 = {
    "mamba_d_ssm": 96,
    "mamba_rms_norm": True,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.9, 1.1],
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
_JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_d_state": 12,
    "mamba_dt_rank": 7,
}
_FALCON_MAMBA = _NO_TOKENS | {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "state_size": 12,
    "layer_norm_epsilon": 1e-6,
    "mixer_rms_eps": 1e-5,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_MINIMAX = _NO_TOKENS | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "block_size": 16,
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 1.4,
    "linear_attn_beta_factor": 0.8,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 1.1,
}
_MAMBA2 = _NO_TOKENS | {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 12,
    "conv_kernel": 4,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-6,
    "initializer_range": 0.1,
}
_ZAMBA = _NO_TOKENS | {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    "mamba_d_state": 12,
    "mamba_dt_rank": 7,
    "tie_word_embeddings": True,
}
_ZAMBA2 = _NO_TOKENS | {
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"],
    "num_key_value_heads": 4,
    "n_mamba_heads": 6,
    "mamba_d_state": 12,
    "mamba_ngroups": 2,
    "time_step_min": 0.04,
    "chunk_size": 16,
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "adapter_rank": 5,
    "use_mem_rope": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-4,
}
_GEMMA3 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT_OSS = _NO_TOKENS | {
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "swiglu_limit": 0.4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
_KIMI = {
    **{key: value for key, value in _BASE.items() if key != "head_dim"},
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LING = {
    **{key: value for key, value in _KIMI.items() if key not in ("linear_head_dim", "linear_num_heads")},
    "head_dim": 12,
    "first_k_dense_replace": 1,
    "kda_lower_bound": -3.0,
}
_GLM5_NEXT = {
    **_KIMI,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "linear_lower_bound": -3.0,
    "q_lora_rank": 18,
    "qk_rope_head_dim": 0,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.3,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_kpool": 4,
    "index_topk": 40,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-3,
    "rms_norm_eps": 1e-4,
}
_NOT_OF_INKLING2 = ("mlp_layer_types", "n_shared_experts", "logits_mup_width_multiplier")
_INKLING = _NO_TOKENS | {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 12,
    "sliding_window_size": 20,
    "d_rel": 6,
    "rel_extent": 50,
    "log_scaling_n_floor": 40,
    "log_scaling_alpha": 0.7,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 1.7,
    "logits_mup_width_multiplier": 1.3,
    "rms_norm_eps": 1e-4,
}
_INKLING2 = {key: value for key, value in _INKLING.items() if key not in _NOT_OF_INKLING2} | {
    "unpadded_vocab_size": 211,
    "n_layers_per_attn_res_block": 3,
    "qk_l2_clip_threshold": 1.1,
    "rel_l2_clip_threshold": 0.6,
    "mlp_gate_softcap": 0.3,
    "mlp_up_softcap": 0.4,
    "final_logit_softcapping": 1.5,
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"shared_expert_intermediate_size": 40}
_SHARED_AS_WIDE = {"shared_expert_intermediate_size": 24}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
}

_QWEN4_EXP = {
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "hc_count": 3,
    "hc_lowrank": 10,
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [1, 4],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
    "seed": 77,
    "eos_token_id": 5,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 72,
    "indexer_budget": 40,
    "indexer_compress_ratio": 4,
    "pad_token_id": None,
}
_ZAYA = _NO_TOKENS | {
    **{key: value for key, value in _BASE.items() if key != "intermediate_size"},
    "num_hidden_layers": 4,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid"],
    "sliding_window": 20,
    "rms_norm_eps": 1e-4,
    "num_experts": 5,
    "moe_intermediate_size": 24,
    "router_hidden_size": 20,
    "cca_time1": 3,
    "tie_word_embeddings": False,
}
_WITHOUT_HEAD_DIM = {key: value for key, value in _BASE.items() if key != "head_dim"}

_TEXT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BambaForCausalLM": ("BambaConfig", _WITHOUT_HEAD_DIM | _BAMBA),
    "FalconH1ForCausalLM": ("FalconH1Config", _WITHOUT_HEAD_DIM | _MAMBA2_LAYER | _NO_TOKENS | _FALCON_H1),
    "FalconMambaForCausalLM": ("FalconMambaConfig", _FALCON_MAMBA),
    "MambaForCausalLM": ("MambaConfig", {k: v for k, v in _FALCON_MAMBA.items() if k != "mixer_rms_eps"}),
    "JambaForCausalLM": ("JambaConfig", _WITHOUT_HEAD_DIM | _NO_TOKENS | _JAMBA),
    "MiniMaxForCausalLM": ("MiniMaxConfig", _BASE | _MINIMAX),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        _WITHOUT_HEAD_DIM | _MAMBA2_LAYER | _NO_TOKENS | _GRANITE,
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {k: v for k, v in _BASE.items() if k != "num_hidden_layers"} | _NO_TOKENS | _NEMOTRON,
    ),
    "Mamba2ForCausalLM": ("Mamba2Config", _MAMBA2),
    "ZambaForCausalLM": ("ZambaConfig", _WITHOUT_HEAD_DIM | _ZAMBA),
    "Zamba2ForCausalLM": ("Zamba2Config", _WITHOUT_HEAD_DIM | _ZAMBA2),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _BASE | _GEMMA3),
    "GptOssForCausalLM": ("GptOssConfig", _BASE | _GPT_OSS),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", _WITHOUT_HEAD_DIM | _RECURRENT_GEMMA),
    "InklingForCausalLM": ("InklingTextConfig", _BASE | _INKLING),
    "Inkling2ForCausalLM": ("Inkling2TextConfig", _BASE | _INKLING2),
    "Inkling2ForConditionalGeneration": ("Inkling2Config", _BASE | _INKLING2),
    "InklingForConditionalGeneration": ("InklingConfig", _BASE | _INKLING),
    "KimiLinearForCausalLM": ("KimiLinearConfig", _KIMI),
    "BailingHybridForCausalLM": ("BailingHybridConfig", _LING),
    "Glm5NextForConditionalGeneration": ("Glm5NextConfig", _GLM5_NEXT),
    "Lfm2ForCausalLM": ("Lfm2Config", _BASE | _LFM2),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", _BASE | _LFM2 | _MOE | {"num_dense_layers": 1}),
    "Lfm3ForCausalLM": ("Lfm3Config", _BASE | _LFM3),
    "LlamaForCausalLM": ("LlamaConfig", _BASE),
    "MistralForCausalLM": ("MistralConfig", _BASE | {"sliding_window": None}),
    "OlmoHybridForCausalLM": ("OlmoHybridConfig", _BASE | _LINEAR | {"pad_token_id": None, "eos_token_id": None}),
    "Qwen2ForCausalLM": ("Qwen2Config", _BASE),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", _BASE | _MOE | _SHARED | {"mlp_only_layers": [1]}),
    "Qwen3ForCausalLM": ("Qwen3Config", _BASE),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", _BASE | _MOE | {"norm_topk_prob": True}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", _BASE | _LINEAR | _MOE | _SHARED_AS_WIDE),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", _BASE | _LINEAR),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", _BASE | _LINEAR | _MOE | _SHARED),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5Config", _BASE | _LINEAR),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeConfig", _BASE | _LINEAR | _MOE | _SHARED),
    "Qwen4ExpForCausalLM": ("Qwen4ExpTextConfig", _BASE | _LINEAR | _MOE | _SHARED | _QWEN4_EXP),
    "Qwen4ExpForConditionalGeneration": ("Qwen4ExpConfig", _BASE | _LINEAR | _MOE | _SHARED | _QWEN4_EXP),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", _BASE),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoeConfig", _BASE | _MOE),
    "ZayaForCausalLM": ("ZayaConfig", _ZAYA),
}
"""By architecture. Wrappers with a tower that Weft runs are in no list of architectures."""
_WITHOUT_DENSE_MLP = (
    "Inkling2ForCausalLM", "Inkling2ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration",
)  # fmt: skip


def make_config(arch: str, **overrides: Any) -> Any:
    """The transformers config of a tiny ``arch``; ``overrides`` are keys of its (text) config, and ``vision`` and
    ``top`` keys of the vision config and of the whole one."""
    name, defaults = _TEXT_CONFIGS[arch]
    settings = {**defaults, **overrides}
    if arch in _WITHOUT_DENSE_MLP:
        settings.pop("intermediate_size", None)
    config_class = getattr(transformers, name)
    if not arch.endswith("ForConditionalGeneration"):
        return config_class(**settings)
    tied, own = settings.pop("tie_word_embeddings", False), settings.pop("vision", {})
    top = settings.pop("top", {})
    width = "text_hidden_size" if "Inkling" in arch else "out_hidden_size"
    vision = ({} if "Inkling" in arch else _VISION) | {width: settings["hidden_size"]} | own
    if "VL" in arch:
        vision = {"deepstack_visual_indexes": [0]} | vision
    return config_class(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **top)


def make_model(arch: str, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model in float32; every parameter that is usually constant is random too. ``silent``: ids
    whose logits are zero, so that they are not sampled."""
    return deepcopy(shared_model(arch, seed, **overrides))


def shared_model(arch: str, seed: int = 0, **overrides: Any) -> Any:
    """The model of ``make_model``, for callers that do not change it."""
    key = repr((arch, seed, sorted(overrides.items())))
    if key not in _MADE:
        _MADE[key] = _make_model(arch, seed, overrides)
    if len(_MADE) > 100:
        del _MADE[next(iter(_MADE))]
    return _MADE[key]


_MADE: dict[str, Any] = {}
"""The models that this process made last. A copy takes a tenth of the time that transformers needs."""


def _make_model(arch: str, seed: int, overrides: dict[str, Any]) -> Any:
    overrides = dict(overrides)
    silent = overrides.pop("silent", ())
    config = make_config(arch, **overrides)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one refuses odd widths
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, arch)(config).eval()
    _norm_by_group(model, config)
    _clamp_by_config(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("hc.base", "hc.scale", "compress_ape", "compress_gate", "hc.fn", "ple.conv1d.weight")):
                parameter.copy_(torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator))
            if name.endswith("qk_norm.temp"):  # zeros, with which every score is zero
                parameter.copy_(torch.empty_like(parameter).uniform_(0.7, 1.3, generator=generator))
            if name.endswith("gate.down_proj.weight"):  # so that tokens choose different experts
                parameter.mul_(10.0)
            if name.endswith(("hidden_states_bias", "residual_bias")):
                parameter.copy_(torch.empty_like(parameter).uniform_(-0.03, 0.03, generator=generator))
            if name.endswith(("_input.query", "static_weight")):  # zeros in Inkling 2
                limit = 2.0 if name.endswith("query") else 0.5
                parameter.copy_(torch.empty_like(parameter).uniform_(-limit, limit, generator=generator))
            if ".router_mlp." in name and name.endswith("weight"):
                parameter.mul_(5.0)
            is_sharp = name.endswith(("q_proj.weight", "k_proj.weight", "cls_position_embedding"))
            if ".vision_tower." in name and is_sharp:
                parameter.mul_(10.0)  # so that patches attend to different ones
            if name.endswith(
                (
                    "norm.weight",
                    "layernorm.weight",
                    "norm_key.weight",
                    "norm_query.weight",
                    "norm_conv.weight",
                    "norm_f.weight",
                    "dt_bias",
                    "proj_bias",
                    "input_gate_bias",
                    "recurrent_gate_bias",
                    ".bias",
                    ".D",
                    "sinks",
                    "hidden_states_scale",
                    "residual_scale",
                    "router_states_scale",
                    "global_scale",
                    "l2_clip.scale",
                    "layernorm_before.weight",
                    "layernorm_after.weight",
                    "lambda_1",
                    "lambda_2",
                    "class_embedding",
                )
            ):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias", "balancing_biases")):
                buffer.uniform_(-0.3, 0.3, generator=generator)
        for token in silent:
            model.lm_head.weight[token] = 0.0
    return model


def _norm_by_group(model: Any, config: Any) -> None:
    """Give Mamba-2's gated norms their groups where this transformers takes them over all channels (before 5.23)."""
    num_groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", None)
    for module in model.modules():
        is_ours = type(module).__name__.endswith("RMSNormGated") and num_groups is not None
        if is_ours and not hasattr(module, "group_size") and not hasattr(module, "n_groups"):
            module.forward = partial(_grouped_norm, module, num_groups)


def _clamp_by_config(model: Any, config: Any) -> None:
    """Give gpt-oss' experts the limit of the config where this transformers knows one alone (before 5.23)."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.alpha, module.limit = getattr(config, "swiglu_alpha", module.alpha), config.swiglu_limit


def _grouped_norm(norm: Any, num_groups: int, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    gated = (hidden_states * torch.nn.functional.silu(gate)).unflatten(-1, (num_groups, -1))
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (gated * scale).flatten(-2)


def make_checkpoint(
    arch: str, path: Path, seed: int = 0, *, with_tokenizer: bool | str = False, **overrides: Any
) -> Path:
    """Save a tiny random checkpoint (two configs and ``model.safetensors``) and return its folder.

    Args:
        arch: one of ``ARCHITECTURES``.
        with_tokenizer: add a byte-level BPE tokenizer with Qwen's special tokens and a chat template; the vocabulary
            is then at least 320 and EOS is ``<|im_end|>``. ``"sentencepiece"``: one like Llama 2's instead.
        overrides: keys of the (text) config, and ``save_options`` for ``save_pretrained``.
    """
    key = repr((arch, seed, with_tokenizer, sorted(overrides.items())))
    if key not in _SAVED:
        with tempfile.TemporaryDirectory() as folder:
            _save(arch, Path(folder), seed, with_tokenizer, overrides)
            _SAVED[key] = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    Path(path).mkdir(parents=True, exist_ok=True)
    for name, content in _SAVED[key].items():
        (Path(path) / name).write_bytes(content)
    if len(_SAVED) > 200:
        del _SAVED[next(iter(_SAVED))]
    return Path(path)


_SAVED: dict[str, dict[str, bytes]] = {}
"""The files of checkpoints that this process has saved, by what they hold. Saving one takes longer than most tests."""


def _save(arch: str, path: Path, seed: int, with_tokenizer: bool | str, overrides: dict[str, Any]) -> None:
    overrides = dict(overrides)
    save_options = overrides.pop("save_options", {})
    if arch == "OlmoHybridForCausalLM":  # transformers cuts the convolutions in equal parts when it saves them
        save_options = {"save_original_format": False} | save_options
    if with_tokenizer:
        from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE, save_sentencepiece_tokenizer, save_tokenizer

        overrides = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID} | overrides
        save = save_sentencepiece_tokenizer if with_tokenizer == "sentencepiece" else save_tokenizer
        save(path)
    shared_model(arch, seed, **overrides).save_pretrained(path, **save_options)
