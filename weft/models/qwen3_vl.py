"""Qwen3-VL and Qwen3-VL-MoE (arXiv 2511.21631): Qwen3's decoder with a vision tower.

Job: the weight-name tables. Does not know: anything that ``vision_language.py``, ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS
from weft.models.vision_language import VisionLanguageModel


class Qwen3VLForCausalLM(VisionLanguageModel):
    """The language model stands under ``model.language_model``, the tower under ``model.visual``."""

    weight_table = WeightTable(
        packed=ATTENTION_PARTS | MLP_PARTS,
        renames={"model.language_model.": "model."},
        ignorable=("model.visual.*",),
    )


class Qwen3VLMoeForCausalLM(VisionLanguageModel):
    """The router's tensor is called ``gate``."""

    weight_table = WeightTable(
        packed=ATTENTION_PARTS | MLP_PARTS | {"router": ("gate",)},
        renames={"model.language_model.": "model."},
        ignorable=("model.visual.*",),
    )
