"""Qwen3: Llama's block with an RMSNorm on every query and key head (arXiv 2505.09388).

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM


class Qwen3ForCausalLM(CausalLM):
    """Nothing beyond the shared decoder."""

    weight_table = WeightTable(packed=ATTENTION_PARTS | MLP_PARTS)
