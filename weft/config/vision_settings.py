"""Whether a model runs its vision tower, and how much of it at a time.

Job: the settings of images that were left open, each with its reason. Does not know: other settings' rules.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from weft.config.model import ModelConfig
from weft.errors import ConfigError

ENCODER_TOKENS, CACHED_TOKENS = 16384, 32768
"""Of a step of the vision tower, and of the cache of its embeddings: one image of 4096x4096 pixels, and two."""


def choose_vision(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig) -> ModelConfig:
    """Fill the settings of images. Returns the model, with its tower if it runs.

    Raises:
        ConfigError: the tower is asked for where it cannot run, or sizes that contradict each other.
    """
    why_not = _why_not(values, model)
    given = values["language_model_only"]
    if given is False and why_not and model.vision is not None:
        raise ConfigError(f"language_model_only=False: {why_not}; leave it out to run the text model alone")
    if given or why_not:
        values["language_model_only"] = True
        reasons["language_model_only"] = why_not or "asked for"
        for name in ("max_num_encoder_input_tokens", "encoder_cache_size"):
            if values[name] is not None:
                raise ConfigError(f"{name}={values[name]} has no effect without a vision tower; leave it out")
            reasons[name] = "no vision tower runs"
        return model
    values["language_model_only"] = False
    reasons.setdefault("language_model_only", "the checkpoint has a vision tower")
    _choose_sizes(values, reasons)
    return model.with_vision()


def _why_not(values: dict[str, Any], model: ModelConfig) -> str:
    """Why no tower can run; empty if it can."""
    if model.vision is None:
        return "the checkpoint has no vision tower"
    if values["tensor_parallel_size"] > 1:
        return f"images run on one GPU, not with tensor_parallel_size={values['tensor_parallel_size']}"
    if values["speculative_config"] is not None:
        return "images do not run with speculative_config"
    if find_spec("PIL") is None:
        return "images need Pillow, which is not installed: pip install 'weft[images]'"
    return ""


def _choose_sizes(values: dict[str, Any], reasons: dict[str, str]) -> None:
    step, cache, context = "max_num_encoder_input_tokens", "encoder_cache_size", values["max_model_len"]
    if values[step] is None:
        largest = min(ENCODER_TOKENS, context) if values[cache] is None else min(ENCODER_TOKENS, context, values[cache])
        values[step] = largest
        reasons[step] = "max_model_len" if largest == context else "default, or the encoder cache where it is smaller"
    if values[cache] is None:
        values[cache] = max(CACHED_TOKENS, values[step])
        reasons[cache] = "default, or one step of the tower where that is more"
    if values[cache] < values[step]:
        raise ConfigError(
            f"{cache}={values[cache]} is less than {step}={values[step]}: what a step encodes must fit into the cache; "
            "raise the one or lower the other"
        )
