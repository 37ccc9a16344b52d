"""Configurations of real models with few layers and experts, for engines that start in seconds on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fp8_checkpoints import quantization_config

CONFIGS = Path(__file__).parents[1] / "benchmarks" / "configs"
SMALL = {"vocab_size": 8192, "max_position_embeddings": 1200}
FEW: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"num_hidden_layers": 3},
    "qwen3-next-12l": {"num_hidden_layers": 4, "num_experts": 64},
    "granite-4.0-h-tiny": {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba-mini-8l": {"num_experts": 4, "intermediate_size": 2048},
    "lfm2-8b-a1b": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "gpt-oss-20b": {
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": None,
    },
    "nemotron-h-8b": {"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*M-"},
    "kimi-linear-12l": {
        "num_hidden_layers": 4,
        "num_experts": 32,
        "model_max_length": 1200,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "ling-3.0-flash-12l": {"num_hidden_layers": 3, "layer_group_size": 3, "num_experts": 64, "model_max_length": 1200},
    "inkling": {
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_text",
        "num_hidden_layers": 4,
        "local_layer_ids": [0, 2],
        "hidden_size": 2048,
        "dense_intermediate_size": 4096,
        "first_k_dense_replace": 1,
        "intermediate_size": 768,
        "n_routed_experts": 16,
        "log_scaling_n_floor": 400,
    },
    "zaya1": {"architectures": ["ZayaForCausalLM"], "model_type": "zaya", "num_hidden_layers": 4},
}
"""Keys that differ from the published configuration of this name. Inkling and ZAYA1 have no published configuration:
other keys have their defaults."""


def cut(name: str, folder: Path, *, fp8_by_block: bool = False) -> Path:
    """Write the configuration of ``name`` to ``folder``. Weights are dummies."""
    folder.mkdir(parents=True, exist_ok=True)
    published = CONFIGS / name / "config.json"
    config = (json.loads(published.read_text()) if published.exists() else {}) | SMALL | FEW[name]
    if fp8_by_block:
        config["quantization_config"] = quantization_config("block")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
