"""Qwen3-Next: three Gated DeltaNet layers to one gated full-attention layer, experts with a shared one.

Job: the weight-name table, and the grouped storage of the Gated DeltaNet projection. Does not know: anything that
``decoder.py`` and the config express.
"""

from __future__ import annotations

from functools import partial

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.layers.gated_delta_net import GatedDeltaNet, InProjLayout
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, MLP_PARTS, CausalLM

ROUTER_PARTS: dict[str, tuple[str, ...]] = {"router": ("gate", "shared_expert_gate")}


class Qwen3NextForCausalLM(CausalLM):
    """``mtp.*`` is the multi-token-prediction head, for speculative decoding (``models/mtp.py``)."""

    mixers = CausalLM.mixers | {GatedDeltaNetConfig: partial(GatedDeltaNet, layout=InProjLayout.GROUPED)}
    weight_table = WeightTable(
        packed=ATTENTION_PARTS | MLP_PARTS | ROUTER_PARTS | {"in_proj": ("in_proj_qkvz", "in_proj_ba")},
        ignorable=("mtp.*",),
    )
