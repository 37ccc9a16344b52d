"""How speculative decoding affects other settings, and the number of drafts by batch size."""

import dataclasses
import logging
from typing import Any

from weft.config.draft_profile import draft_profile_fits, find_draft_profile
from weft.config.model import ModelConfig
from weft.errors import ConfigError

logger = logging.getLogger(__name__)

_CPU_HEAD = "on a CPU drafts of the head slow batches down, even if all are accepted"
"""Measured with the bundled model: a gain for one sequence, a loss from 4 sequences on (``drafts-cpu.json``)."""


def choose_speculation(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig) -> ModelConfig:
    """Choose the settings that depend on drafts. Returns the model, with its multi-token-prediction head if that
    drafts."""
    config = values["speculative_config"]
    if config is None:
        reasons["speculative_config"] = "off: whether drafts pay depends on the text and the batch"
        return model
    if config.synthetic_acceptance_rate is not None and values["load_format"] != "dummy":
        raise ConfigError(
            f"speculative_config: synthetic_acceptance_rate={config.synthetic_acceptance_rate:g} makes drafts part of "
            "the text whether they are right or not, to measure with load_format='dummy'; leave it out otherwise"
        )
    if config.method != "mtp":
        return model
    if model.mtp_chain and (config.is_default or config.is_auto):
        most = min(config.num_speculative_tokens, len(model.mtp_chain))
        config = values["speculative_config"] = dataclasses.replace(config, num_speculative_tokens=most)
    return model.with_mtp(config.num_speculative_tokens)


def choose_drafts(
    values: dict[str, Any], reasons: dict[str, str], plain: ModelConfig, model: ModelConfig
) -> ModelConfig:
    """Choose the number of drafts for each batch size. Returns the model, without its head if drafts never pay.

    Args:
        plain, model: the model without and with the head that drafts.
    """
    name, config = "speculative_config", values["speculative_config"]
    if config is None:
        return model
    if values["max_num_batched_tokens"] == 1:
        raise ConfigError(
            f"{name}: max_num_batched_tokens=1 has no room for a draft beside the token that is verified with it; give "
            "max_num_batched_tokens=2 or more, or leave speculative_config out"
        )
    reasons[name] = f"{config}: a step verifies up to {config.num_speculative_tokens} drafts"
    if config.method == "mtp" and values["device"] == "cpu" and not config.is_auto:
        if config.is_default:
            config = dataclasses.replace(config, drafts_by_batch=((1, config.num_speculative_tokens),))
            values[name], reasons[name] = config, f"{config}; larger batches none: {_CPU_HEAD}"
            return model
        reasons[name] += f" in batches of every size, as given, although {_CPU_HEAD}"
        logger.warning("%s: %s", name, reasons[name])
    if config.is_auto:
        profile, why = find_draft_profile(draft_profile_fits(values, plain, config))
        if profile is not None and not profile.drafts_by_batch:
            values[name], reasons[name] = None, f"off: {why}, drafts of method {config.method} lose at every batch size"
            return plain
        if profile is None:
            reasons[name] = f"{config} for every batch size: {why}"
        else:
            limits = profile.drafts_by_batch
            most = max(drafts for _, drafts in limits)
            config = dataclasses.replace(config, num_speculative_tokens=most, drafts_by_batch=limits)
            values[name], reasons[name] = config, f"{config}; larger batches none: {why}"
            return model.with_mtp(most) if config.method == "mtp" else model
    return model
