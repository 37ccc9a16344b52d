"""From an architecture's name to a model: the class that the family table (``config/families.py``) names."""

from __future__ import annotations

from importlib import import_module

from weft.config.families import FAMILIES
from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.models.decoder import CausalLM
from weft.models.mtp import MultiTokenPredictor
from weft.quantization import create_weights


def create_model(config: ModelConfig, context: ModelContext) -> CausalLM:
    """Build the model with uninitialised parameters on ``context.device`` and fill ``context.layers``.

    Raises:
        ConfigError: a dimension does not divide over the tensor-parallel group, or not into blocks of FP8 weights.
    """
    module, name = FAMILIES[config.architecture].model.split(":")
    model: CausalLM = getattr(import_module(module), name)(config, context).eval()
    if config.runs_mtp:
        model.add_module("mtp", MultiTokenPredictor(config, context, model.mixers).eval())
    create_weights(model, config.quantization, context)
    return model
