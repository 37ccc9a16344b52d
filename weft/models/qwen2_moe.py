"""Qwen2-MoE (arXiv 2407.10671): Qwen2's block with routed experts and a gated shared one.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM
from weft.models.qwen3_next import ROUTER_PARTS


class Qwen2MoeForCausalLM(CausalLM):
    """Nothing beyond the shared decoder."""

    weight_table = WeightTable(packed=ATTENTION_PARTS | MLP_PARTS | ROUTER_PARTS)
