"""Kimi-Linear (arXiv 2510.26692): three layers of Kimi Delta Attention to one of latent attention, routed experts.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig
from weft.layers.kimi_delta import KimiDelta
from weft.layers.latent_attention import LatentAttention
from weft.layers.weight import WeightTable
from weft.models.decoder import MLP_PARTS, CausalLM


class KimiLinearForCausalLM(CausalLM):
    """Experts stand under ``block_sparse_moe``, dense layers under either name."""

    mixers = CausalLM.mixers | {KimiDeltaConfig: KimiDelta, LatentAttentionConfig: LatentAttention}
    weight_table = WeightTable(
        packed=MLP_PARTS
        | {
            "router": ("gate",),
            "in_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
            "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
            "q_kv_proj": ("q_proj", "kv_a_proj_with_mqa"),
            "q_a_kv_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        },
        modules={"out_proj": "o_proj"},
        aliases={
            "block_sparse_moe": "mlp",
            "shared_experts": "shared_expert",
            "w1": "gate_proj",
            "w2": "down_proj",
            "w3": "up_proj",
            "o_norm": "norm",
        },
    )
