"""LFM3: short convolutions, sliding windows and full attention with head gates; readers of its keys."""

from dataclasses import replace
from functools import partial

from weft.config.attention import AttentionConfig, read_attention
from weft.config.family import Family
from weft.config.json_object import JsonObject
from weft.config.short_conv import read_short_conv
from weft.config.sliding_window import read_sliding_window

_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Rotary settings of a file without any, by layer type."""


def lfm3_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of LFM3: of four layers, the third is full attention and the first has a window, but for layer 0."""
    kinds = {2: "full_attention", 0: "sliding_attention"}
    return tuple(kinds.get(i % 4, "conv") if i else "conv" for i in range(num_layers))


def read_lfm3_attention(text: JsonObject, layer_type: str) -> AttentionConfig:
    """Read attention of LFM3. Each layer type has rotary settings of its own."""
    if not text.boolean("use_sandwich_norm", True):
        raise text.unsupported("use_sandwich_norm", " for this architecture; supported is true")
    settings = text.object("rope_parameters")
    nested = settings.object(layer_type) if settings is not None else None
    if settings is not None and nested is None:
        raise text.wrong("rope_parameters", f"an object with an entry {layer_type!r}")
    rope = nested.values if nested is not None else _ROPE[layer_type]
    attention = read_attention(JsonObject(text.values | {"rope_parameters": rope}, text.where), qk_norm=True)
    return replace(attention, head_gate=text.boolean("use_attention_gate", True))


LFM3 = Family(
    {
        "full_attention": {"self_attn": partial(read_lfm3_attention, layer_type="full_attention")},
        "sliding_attention": {
            "self_attn": partial(
                read_sliding_window, attention=partial(read_lfm3_attention, layer_type="sliding_attention")
            )
        },
        "conv": {"conv": read_short_conv},
    },
    layer_types=lfm3_layer_types,
    norm_placement=dict.fromkeys(("full_attention", "sliding_attention", "conv"), "sandwich"),
    keys={"norm_eps": "rms_norm_eps"},
)
