"""The vision towers of Inkling and Inkling 2 in ``config.json``."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

from weft.config.json_object import JsonObject
from weft.config.vision import (
    ACTIVATIONS,
    Inkling2TowerConfig,
    InklingFold,
    InklingTowerConfig,
    VisionConfig,
    VisionTokens,
    check_rotation,
    read_sizes,
    with_defaults,
)

_DEFAULTS: dict[str, Any] = {
    "depth": 23,
    "hidden_size": 1024,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 20,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "posemb_grid_size": 32,
    "projection_hidden_dim": 4096,
    "out_hidden_size": 4608,
    "mlp_ratio": 4.0,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
}
_SYNONYMS = {
    "native_patch_size": "patch_size",
    "adapter_merge_size": "spatial_merge_size",
    "num_channels": "in_channels",
    "text_hidden_size": "out_hidden_size",
}
_INKLING_DEFAULTS: dict[str, Any] = {"depth": 24, "in_channels": 3, "patch_size": 40, "temporal_patch_size": 2}
_INKLING_SYNONYMS = {"n_layers": "depth", "num_channels": "in_channels", "n_channels": "in_channels"}
_IMAGE_TOKEN = 200054


def read_inkling2_vision(top: JsonObject, text: JsonObject) -> VisionConfig | None:
    """Read the checkpoint's tower; None if there is no ``vision_config``.

    Raises:
        ConfigError, UnsupportedModelError: see ``config/checkpoint.py``.
    """
    given = top.object("vision_config")
    if given is None:
        return None
    vision = with_defaults(given, _DEFAULTS, _SYNONYMS)
    width = int(vision.integer("hidden_size") * vision.number("mlp_ratio"))
    vision = JsonObject({"intermediate_size": width} | vision.values, vision.where)
    rope = vision.object("rope_parameters") or JsonObject({}, vision.where)
    _check_supported(vision)
    return VisionConfig(
        **read_sizes(vision),
        num_position_embeddings=vision.integer("posemb_grid_size") ** 2,
        activation=vision.text("hidden_act"),
        rope_theta=rope.number("rope_theta", 10_000.0),
        tokens=VisionTokens(image=top.integer("image_token_id", _IMAGE_TOKEN, low=0)),
        mrope_section=None,
        class_token=True,
        processor="inkling2",
        inkling2=Inkling2TowerConfig(
            vision.integer("projection_hidden_dim"),
            vision.boolean("projector_bias", False),
            vision.number("layer_norm_eps"),
        ),
    )


def _check_supported(vision: JsonObject) -> None:
    """Refuse what the reference reads and this tower does not compute."""
    if vision.text("hidden_act") not in ACTIVATIONS:
        raise vision.unsupported("hidden_act", f"; supported are {', '.join(ACTIVATIONS)}")
    for key, supported in (("in_channels", 3), ("temporal_patch_size", 1)):
        if vision.integer(key) != supported:
            raise vision.unsupported(key, f"; supported is {supported}")
    check_rotation(vision)
    size = vision.integer("hidden_size") // vision.integer("num_heads")
    if vision.integer("head_dim", size) != size:
        raise vision.unsupported("head_dim", f"; supported is hidden_size / num_heads = {size}")


def read_inkling_vision(top: JsonObject, text: JsonObject) -> VisionConfig | None:
    """Read the checkpoint's tower; None if there is no ``vision_config``.

    Raises:
        ConfigError, UnsupportedModelError: see ``config/checkpoint.py``.
    """
    given = top.object("vision_config")
    if given is None:
        return None
    vision = with_defaults(given, _INKLING_DEFAULTS, _INKLING_SYNONYMS)
    for key, supported in (("in_channels", 3), ("temporal_patch_size", 2)):
        if vision.integer(key) != supported:
            raise vision.unsupported(key, f"; supported is {supported}")
    if vision.text("vision_encoder_type", "hmlp") != "hmlp":
        raise vision.unsupported("vision_encoder_type", "; supported is 'hmlp'")
    if not vision.boolean("use_vision_norm", True):
        raise vision.unsupported("use_vision_norm", "; supported is true")
    depth, side, frames = (vision.integer(key) for key in ("depth", "patch_size", "temporal_patch_size"))
    width = text.integer("hidden_size")  # whatever ``text_hidden_size`` says
    return VisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=width,
        num_heads=1,
        in_channels=vision.integer("in_channels"),
        patch_size=side,
        temporal_patch_size=frames,
        spatial_merge_size=1,
        out_hidden_size=width,
        num_position_embeddings=0,
        activation="gelu",
        rope_theta=10_000.0,
        tokens=VisionTokens(image=top.integer("image_token_id", _IMAGE_TOKEN, low=0)),
        mrope_section=None,
        processor="inkling",
        inkling=InklingTowerConfig(_folds(depth, side, frames, vision.integer("in_channels"), width)),
    )


class _Scale(NamedTuple):
    """Pixels that are one cell: frames, side in each frame; and channels of the cell."""

    frames: int
    side: int
    channels: int


def _folds(depth: int, side: int, frames: int, channels: int, width: int) -> tuple[InklingFold, ...]:
    """The layers of a tower, as transformers plans them: cells grow evenly, in logarithms, from a pixel to a patch."""
    scales = _scales(side, frames, channels)
    size = math.log(side * side * frames * channels)
    targets = [size * i / depth for i in range(depth + 1)]
    sizes = [math.log(scale.frames * scale.side**2) for scale in scales]
    chosen = _nearest(targets, sizes) if depth >= len(scales) else _nearest_once(targets, sizes)
    chosen = [0, *chosen[1:-1], len(scales) - 1]
    folds = []
    for i, (start, end) in enumerate(pairwise(chosen)):
        before, after = scales[start], scales[end]
        out = width if i == depth - 1 else after.channels
        folds.append(InklingFold(after.frames // before.frames, after.side // before.side, before.channels, out))
    return tuple(folds)


def _scales(side: int, frames: int, channels: int) -> list[_Scale]:
    """Sizes of cells: the greatest prime factors of the side come first, and then those of the frames."""
    scales = [_Scale(1, 1, channels)]
    for factor in reversed(_prime_factors(side)):
        grown = scales[-1].side * factor
        scales.append(_Scale(1, grown, -(-(grown**2) * channels // 64) * 64))
    for factor in reversed(_prime_factors(frames)):
        grown = scales[-1].frames * factor
        scales.append(_Scale(grown, side, side**2 * channels * grown * 64))
    return scales


def _prime_factors(number: int) -> list[int]:
    """Ascending."""
    factors, divisor = [], 2
    while number > 1:
        if number % divisor:
            divisor += 1
        else:
            factors.append(divisor)
            number //= divisor
    return factors


def _nearest(targets: list[float], sizes: list[float]) -> list[int]:
    """The nearest size of each target, the smaller one of two."""
    return [min(range(len(sizes)), key=lambda j: abs(target - sizes[j])) for target in targets]


def _nearest_once(targets: list[float], sizes: list[float]) -> list[int]:
    """A size for each target, each at most once, with the least sum of distances. Sizes ascend, as targets do."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (len(sizes) + 1)  # with the first j sizes
    for target in targets:
        row: list[tuple[float, list[int]]] = [(math.inf, [])]
        for j, size in enumerate(sizes):
            cost, used = best[j]
            row.append(min(row[-1], (cost + abs(target - size), [*used, j])))
        best = row
    return best[-1][1]
