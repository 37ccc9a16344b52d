"""Granite 4 (GraniteMoeHybrid): Mamba-2 with a few layers of attention without rotation, experts with a shared MLP.

Job: the weight-name tables, of checkpoints with experts and without. Does not know: anything that ``decoder.py`` and
the config express.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.mamba2 import Mamba2Config
from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.mamba2 import Mamba2
from weft.layers.weight import WeightTable
from weft.models.decoder import ATTENTION_PARTS, CausalLM

_SHARED = WeightTable(
    packed=ATTENTION_PARTS | {"router": ("router.layer",)},
    modules={"gated_norm": "norm", "mlp": "block_sparse_moe", "down_proj": "output_linear"},
    fused={"gate_up_proj": "input_linear"},
)


class GraniteMoeHybridForCausalLM(CausalLM):
    """The shared MLP stands beside the experts in files; in a model without experts it is the MLP."""

    mixers = CausalLM.mixers | {Mamba2Config: Mamba2}
    weight_table = replace(
        _SHARED,
        patterns={
            r"\.shared_mlp\.": ".block_sparse_moe.shared_expert.",
            r"\.block_sparse_moe\.input_linear\.weight$": ".block_sparse_moe.experts.gate_up_proj",
            r"\.block_sparse_moe\.output_linear\.weight$": ".block_sparse_moe.experts.down_proj",
        },
    )

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        if config.moe is None:
            self.weight_table = replace(_SHARED, modules=_SHARED.modules | {"mlp": "shared_mlp"})
