"""LFM2 and LFM2-MoE (arXiv 2511.23404): double-gated short convolutions between layers of full attention.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.short_conv import ShortConvConfig
from weft.layers.short_conv import ShortConv
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, CausalLM


class Lfm2ForCausalLM(CausalLM):
    """The published names differ from the shared decoder's modules; ``embedding_norm`` is the norm after the layers."""

    mixers = CausalLM.mixers | {ShortConvConfig: ShortConv}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS | {"gate_up_proj": ("w1", "w3"), "router": ("gate",)},
        modules={
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "norm": "embedding_norm",
            "mlp": "feed_forward",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
            "o_proj": "out_proj",
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
        },
    )
