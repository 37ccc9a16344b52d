"""Qwen3.5 and Qwen3.5-MoE: Qwen3-Next's block with a dense MLP or experts, and separate projections.

Job: the weight-name table for the text-only and for the published multimodal layout, where the language model stands
under ``model.language_model``. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from functools import partial

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.layers.gated_delta_net import GatedDeltaNet, InProjLayout
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS
from weft.models.qwen3_next import ROUTER_PARTS
from weft.models.vision_language import VisionLanguageModel


class Qwen3_5ForCausalLM(VisionLanguageModel):
    """All Qwen3.5 models. ``mtp.*`` is the multi-token-prediction head (``models/mtp.py``), ``model.visual.*`` the
    vision tower."""

    mixers = VisionLanguageModel.mixers | {GatedDeltaNetConfig: partial(GatedDeltaNet, layout=InProjLayout.SEPARATE)}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS
        | MLP_PARTS
        | ROUTER_PARTS
        | {"in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")},
        renames={"model.language_model.": "model."},
        ignorable=("mtp.*", "model.visual.*"),
    )
