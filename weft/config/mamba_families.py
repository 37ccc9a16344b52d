"""The families with Mamba layers."""

from __future__ import annotations

from functools import partial

from weft.config.attention import read_attention
from weft.config.family import Family
from weft.config.mamba2 import MAMBA_LAYER_NAMES, bamba_layer_types, read_mamba2

_MAMBA2_LAYER = {"mamba_n_heads": 128, "mamba_d_state": 128, "mamba_n_groups": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_BAMBA = _MAMBA2_LAYER | {"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336,
                          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                          "max_position_embeddings": 262144,
                          "rms_norm_eps": 1e-5, "mamba_n_groups": 1, "mamba_d_state": 256, "bos_token_id": 1,
                          "eos_token_id": 2}  # fmt: skip
_MAMBA2 = _MAMBA2_LAYER | {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "mamba_d_head": 64,
                           "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "bos_token_id": 0,
                           "eos_token_id": 2}  # fmt: skip
_MAMBA2_KEYS = {"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state",
                "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "expand": "mamba_expand",
                "use_conv_bias": "mamba_conv_bias", "use_bias": "mamba_proj_bias",
                "layer_norm_epsilon": "rms_norm_eps"}  # fmt: skip

MAMBA_FAMILIES: dict[str, Family] = {
    "BambaForCausalLM": Family(
        "weft.models.bamba:BambaForCausalLM",
        {
            "full_attention": {"self_attn": partial(read_attention, partial_rotary_factor=0.5)},
            "linear_attention": {"mamba": read_mamba2},
        },
        layer_types=bamba_layer_types,
        keys={"layers_block_type": "layer_types"},
        layer_names=MAMBA_LAYER_NAMES,
        mlp_bias=True,
        defaults=_BAMBA,
    ),
    "Mamba2ForCausalLM": Family(
        "weft.models.mamba2:Mamba2ForCausalLM",
        {"linear_attention": {"mamba": read_mamba2}},
        layer_types=lambda _, num_layers: ("linear_attention",) * num_layers,
        without_mlp=("linear_attention",),
        intermediate_size=lambda _: 0,
        keys=_MAMBA2_KEYS,
        defaults=_MAMBA2,
    ),
}
