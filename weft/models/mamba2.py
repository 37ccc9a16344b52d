"""Mamba-2 alone (arXiv 2405.21060): no attention, no MLP, no KV cache.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.mamba2 import Mamba2Config
from weft.layers.mamba2 import Mamba2
from weft.layers.weight import WeightTable
from weft.models.decoder import CausalLM


class Mamba2ForCausalLM(CausalLM):
    """The published names differ from the shared decoder's modules; early files say ``embedding``."""

    mixers = CausalLM.mixers | {Mamba2Config: Mamba2}
    weight_table = WeightTable(
        packed={},
        renames={"backbone.embedding.": "model.embeddings.", "backbone.": "model."},
        modules={
            "embed_tokens": "embeddings",
            "input_layernorm": "norm",
            "mamba": "mixer",
            "gated_norm": "norm",
            "norm": "norm_f",
        },
    )
