"""gpt-oss (arXiv 2508.10925): windows and full attention in turn, all with sinks; experts with biases in all layers.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, CausalLM


class GptOssForCausalLM(CausalLM):
    """The router's tensor has the module's own name."""

    weight_table = WeightTable(packed=ATTENTION_PARTS | {"router": ("router",)})
