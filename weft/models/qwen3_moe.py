"""Qwen3-MoE: Qwen3 with routed experts instead of the dense MLP, no shared expert (arXiv 2505.09388).

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM


class Qwen3MoeForCausalLM(CausalLM):
    """The router's tensor is called ``gate``."""

    weight_table = WeightTable(packed=ATTENTION_PARTS | MLP_PARTS | {"router": ("gate",)})
