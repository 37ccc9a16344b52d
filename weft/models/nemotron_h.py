"""Nemotron-H (arXiv 2504.03624): layers of Mamba-2, attention, squared-ReLU MLPs or experts, one per layer.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.mamba2 import Mamba2Config
from weft.layers.mamba2 import Mamba2
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, CausalLM


class NemotronHForCausalLM(CausalLM):
    """Whatever a layer has is its ``mixer``, and it has one norm. ``mtp.*`` is a multi-token-prediction head."""

    mixers = CausalLM.mixers | {Mamba2Config: Mamba2}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS | {"router": ("gate",)},
        renames={"backbone.": "model."},
        modules={
            "embed_tokens": "embeddings",
            "input_layernorm": "norm",
            "post_attention_layernorm": "norm",
            "mamba": "mixer",
            "self_attn": "mixer",
            "mlp": "mixer",
            "shared_expert": "shared_experts",
            "gated_norm": "norm",
            "norm": "norm_f",
        },
        ignorable=("mtp.*",),
    )
