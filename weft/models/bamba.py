"""Bamba: Mamba-2 with a few layers of full attention, dense MLPs.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.mamba2 import Mamba2Config
from weft.layers.mamba2 import Mamba2
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM


class BambaForCausalLM(CausalLM):
    """The published names differ from the shared decoder's modules."""

    mixers = CausalLM.mixers | {Mamba2Config: Mamba2}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS | MLP_PARTS,
        modules={
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp": "feed_forward",
            "norm": "final_layernorm",
            "gated_norm": "norm",
        },
    )
