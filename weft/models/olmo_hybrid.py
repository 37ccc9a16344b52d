"""OLMo-Hybrid: three Gated DeltaNet layers to one full-attention layer, whose norms stand behind it.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from functools import partial

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.layers.gated_delta_net import GatedDeltaNet, InProjLayout
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM


class OlmoHybridForCausalLM(CausalLM):
    """Published checkpoints call the norms of the Gated DeltaNet layers by names of their own."""

    mixers = CausalLM.mixers | {GatedDeltaNetConfig: partial(GatedDeltaNet, layout=InProjLayout.SINGLE)}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS
        | MLP_PARTS
        | {
            "in_proj": ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
            "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
        },
        modules={"out_proj": "o_proj"},
        aliases={
            "o_norm": "norm",
            "attention_layer_norm": "input_layernorm",
            "feedforward_layer_norm": "post_attention_layernorm",
        },
    )
