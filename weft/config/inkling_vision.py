"""The vision tower of Inkling 2 in ``config.json``."""

from typing import Any

from weft.config.json_object import JsonObject
from weft.config.vision import (
    ACTIVATIONS,
    VisionConfig,
    VisionTokens,
    check_rotation,
    read_sizes,
    with_defaults,
)
from weft.config.vision_towers import Inkling2TowerConfig

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
