"""Architecture name to model class.

Job: the one place where names of architectures meet classes. Owns: the table. Does not know: checkpoints.
"""

from __future__ import annotations

from weft.config.model import ModelConfig
from weft.errors import UnsupportedModelError
from weft.layers.context import ModelContext
from weft.models.decoder import CausalLM
from weft.models.llama import LlamaForCausalLM
from weft.models.qwen3 import Qwen3ForCausalLM
from weft.models.qwen3_5 import Qwen3_5ForCausalLM
from weft.models.qwen3_moe import Qwen3MoeForCausalLM
from weft.models.qwen3_next import Qwen3NextForCausalLM
from weft.quantization import create_weights

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5ForCausalLM,
}


def create_model(config: ModelConfig, context: ModelContext) -> CausalLM:
    """Build the model with uninitialised parameters on ``context.device`` and fill ``context.layers``.

    Raises:
        UnsupportedModelError: no class for ``config.architecture``.
        ConfigError: a dimension does not divide over the tensor-parallel group, or not into blocks of FP8 weights.
    """
    if config.architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(MODELS)}"
        )
    model = MODELS[config.architecture](config, context).eval()
    create_weights(model, context)
    return model
