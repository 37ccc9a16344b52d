"""The vision tower of GLM-5.3 in ``config.json``."""

from typing import Any

from weft.config.json_object import JsonObject
from weft.config.vision import (
    GlmTowerConfig,
    VisionConfig,
    VisionTokens,
    check_rotation,
    read_sizes,
    read_tokens,
    with_defaults,
)

_DEFAULTS: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 1536,
    "projection_intermediate_size": 10240,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "attention_bias": True,
}
_TOKENS = VisionTokens(image=154854, video=154855, start=154830, end=154831)


def read_glm_vision(top: JsonObject, text: JsonObject) -> VisionConfig | None:
    """Read the checkpoint's tower; None if there is no ``vision_config``.

    Raises:
        ConfigError, UnsupportedModelError: see ``config/checkpoint.py``.
    """
    given = top.object("vision_config")
    if given is None:
        return None
    vision = with_defaults(given, _DEFAULTS)
    rope = vision.object("rope_parameters") or JsonObject({}, vision.where)
    _check_supported(vision)
    return VisionConfig(
        **read_sizes(vision),
        num_position_embeddings=0,
        activation=vision.text("hidden_act"),
        rope_theta=rope.number("rope_theta", vision.number("rope_theta", 10_000.0)),
        tokens=read_tokens(top, _TOKENS, "image_start_token_id", "image_end_token_id"),
        mrope_section=None,
        processor="glm",
        glm=GlmTowerConfig(
            vision.integer("projection_intermediate_size"),
            vision.number("rms_norm_eps"),
            vision.number("swiglu_limit"),
            vision.boolean("attention_bias", True),
        ),
    )


def _check_supported(vision: JsonObject) -> None:
    """Refuse what the reference reads and this tower does not compute."""
    if vision.text("hidden_act") not in ("silu", "swish"):
        raise vision.unsupported("hidden_act", "; supported is 'silu'")
    if vision.integer("temporal_patch_size") != 2:
        raise vision.unsupported("temporal_patch_size", "; supported is 2, since each second frame has a timestamp")
    check_rotation(vision)
    size = vision.integer("hidden_size") // vision.integer("num_heads")
    if vision.integer("head_dim", size) != size:
        raise vision.unsupported("head_dim", f"; supported is hidden_size / num_heads = {size}")
