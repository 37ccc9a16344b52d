"""Jamba (arXiv 2403.19887): Mamba with a few layers of attention without rotation, experts in every other layer.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.mamba import MambaConfig
from weft.layers.mamba import Mamba
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM

PART_NORMS: dict[str, tuple[str, ...]] = {"part_norms": ("dt_layernorm", "b_layernorm", "c_layernorm")}


class JambaForCausalLM(CausalLM):
    """The published names differ from the shared decoder's modules."""

    mixers = CausalLM.mixers | {MambaConfig: Mamba}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS | MLP_PARTS | PART_NORMS | {"router": ("router",)},
        modules={"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward", "norm": "final_layernorm"},
    )
