"""Llama 3.x (arXiv 2407.21783), Mistral and Qwen2: grouped-query attention and a dense SwiGLU MLP.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM


class LlamaForCausalLM(CausalLM):
    """``rotary_emb.inv_freq`` is a buffer that early checkpoints saved along."""

    weight_table = WeightTable(packed=ATTENTION_PARTS | MLP_PARTS, ignorable=("*.rotary_emb.inv_freq",))
