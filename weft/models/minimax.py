"""MiniMax-Text (arXiv 2501.08313): lightning attention with a layer of full attention in eight, experts in all.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.lightning_attention import LightningAttentionConfig
from weft.layers.lightning_attention import LightningAttention
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, CausalLM


class MiniMaxForCausalLM(CausalLM):
    """Checkpoints also hold buffers, which follow from the geometry."""

    mixers = CausalLM.mixers | {LightningAttentionConfig: LightningAttention}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS | {"in_proj": ("qkv_proj", "output_gate"), "router": ("gate",)},
        modules={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        ignorable=("*.slope_rate", "*.query_decay", "*.key_decay", "*.diagonal_decay", "*.rotary_emb.inv_freq"),
    )
