"""Gemma 3, text (arXiv 2503.19786): five layers with a sliding window to one of full attention, norms on both sides.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM


class Gemma3ForCausalLM(CausalLM):
    """Nothing beyond the shared decoder."""

    weight_table = WeightTable(packed=ATTENTION_PARTS | MLP_PARTS)
