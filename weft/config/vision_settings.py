"""Settings of the vision tower: whether it runs, and how many tokens it encodes at a time."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.config.model import ModelConfig
from weft.config.stored_names import lacks_tower
from weft.config.vision import VisionConfig
from weft.errors import ConfigError

ENCODER_TOKENS, CACHED_TOKENS = 16384, 32768
"""Default tokens per step of the vision tower, and of the cache of embeddings: one image of 4096x4096 pixels, and
two."""

ENCODER_GRAPHS, EMULATED_ENCODER_GRAPHS = (256, 512, 1024, 1536, 2048), (64, 256)
"""Patch counts for which the tower is captured, on a GPU and on the CPU. The host takes about 7 ms per run, whatever
the size. An H200 takes 1.3 ms up to 256 patches, 4.3 ms at 2,048, and more than the host above about 2,800
(``benchmarks/vision.py``). The emulator keeps every tensor, so the CPU has fewer sizes."""
_SIZES = "encoder_cuda_graph_patches"


def choose_vision(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig, folder: Path) -> ModelConfig:
    """Choose the settings of images. Returns the model, with its tower if the tower runs. ``folder``: the checkpoint's.

    Raises:
        ConfigError: the tower is asked for and cannot run, or sizes contradict each other.
    """
    why_not = _why_not(values, model, folder)
    given = values["language_model_only"]
    if given is False and why_not and model.vision is not None:
        raise ConfigError(f"language_model_only=False: {why_not}; leave it out to run the text model alone")
    if given or why_not:
        values["language_model_only"] = True
        reasons["language_model_only"] = why_not or "asked for"
        for name in ("max_num_encoder_input_tokens", "encoder_cache_size", _SIZES):
            if values[name] is not None:
                raise ConfigError(f"{name}={values[name]} has no effect without a vision tower; leave it out")
            reasons[name] = "no vision tower runs"
        return model
    values["language_model_only"] = False
    reasons.setdefault("language_model_only", "the checkpoint has a vision tower")
    _choose_sizes(values, reasons)
    return model.with_vision()


def _why_not(values: dict[str, Any], model: ModelConfig, folder: Path) -> str:
    """The reason why no tower can run; empty if it can."""
    if model.vision is None:
        return "the checkpoint has no vision tower"
    if find_spec("PIL") is None:
        return "images need Pillow, which is not installed: pip install 'weft[images]'"
    if values["load_format"] == "auto" and lacks_tower(folder):
        return "the checkpoint's files hold no tensors of its vision tower"
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


def choose_encoder_graphs(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig) -> None:
    """Choose the sizes for which the tower is captured, after the graph mode was chosen.

    Raises:
        ConfigError: a size has no effect, or no batch of images has such a size.
    """
    given = values[_SIZES]
    if not model.runs_vision or model.vision is None:
        values[_SIZES] = ()
    elif given == (0,):
        values[_SIZES], reasons[_SIZES] = (), "asked for"
    elif values["cuda_graph_mode"] == "NONE":
        if given is not None:
            raise ConfigError(f"{_SIZES}={list(given)} has no effect with cuda_graph_mode='NONE'; leave one out")
        values[_SIZES], reasons[_SIZES] = (), "cuda_graph_mode=NONE"
    elif given is not None:
        values[_SIZES] = _usable_patches(given, model.vision, values["max_num_encoder_input_tokens"])
    else:
        sizes = EMULATED_ENCODER_GRAPHS if values["device"] == "cpu" else ENCODER_GRAPHS
        most = values["max_num_encoder_input_tokens"] * model.vision.merge_unit
        fitting = [size for size in sizes if size <= most and size % model.vision.merge_unit == 0]
        values[_SIZES] = tuple(fitting) or (most,)
        reasons[_SIZES] = "below these the host takes longer than the device" if fitting else "the largest image"


def _usable_patches(given: tuple[int, ...], vision: VisionConfig, max_tokens: int) -> tuple[int, ...]:
    most, unit = max_tokens * vision.merge_unit, vision.merge_unit
    wrong = [size for size in given if not 0 < size <= most or size % unit]
    if wrong:
        raise ConfigError(
            f"{_SIZES}={list(given)}: {wrong[0]} is not a multiple of {unit} from {unit} to {most}, what a step "
            "encodes (max_num_encoder_input_tokens); give such numbers, or 0 alone for no graphs"
        )
    return tuple(sorted(set(given)))
