"""Gemma 3 (arXiv 2503.19786): keys of its ``config.json`` that no other family has."""

from __future__ import annotations

from dataclasses import replace

from weft.config.attention import AttentionConfig, read_attention
from weft.config.json_object import JsonObject
from weft.config.model import Multipliers
from weft.config.sliding_window import SlidingWindowConfig, read_sliding_window
from weft.errors import UnsupportedModelError

_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def gemma3_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Every ``sliding_window_pattern``-th layer is full attention."""
    pattern = text.integer("sliding_window_pattern", text.integer("_sliding_window_pattern", 6))
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers))


def gemma3_multipliers(text: JsonObject) -> Multipliers:
    """Embeddings are scaled by the root of their width."""
    return Multipliers(embedding=text.integer("hidden_size") ** 0.5)


def read_full_attention(text: JsonObject) -> AttentionConfig:
    """The layers that see everything: their rotary embedding is slow, and may be scaled."""
    return _read(text, "full_attention")


def read_window(text: JsonObject) -> SlidingWindowConfig | AttentionConfig:
    """The layers with a window: their rotary embedding is fast."""
    return read_sliding_window(text, attention=lambda text: _read(text, "sliding_attention"))


def _read(text: JsonObject, layer_type: str) -> AttentionConfig:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if text.raw(key):
            raise UnsupportedModelError(
                f"{text.where}: {key}={text.raw(key)!r} is not supported for this architecture; leave it out"
            )
    attention = read_attention(_with_rope_of(text, layer_type), qk_norm=True)
    return replace(attention, scale=text.number("query_pre_attn_scalar") ** -0.5)


def _with_rope_of(text: JsonObject, layer_type: str) -> JsonObject:
    """The config with the rotary settings of one type of layers, which newer files nest and older ones spell apart."""
    values, theta = dict(text.values), _THETA[layer_type]
    nested = text.object("rope_parameters")
    if nested is not None:
        settings = nested.object(layer_type)
        values["rope_parameters"] = {"rope_theta": theta} | (settings.values if settings is not None else {})
    elif layer_type == "full_attention":
        values["rope_theta"] = text.number("rope_theta", theta)
    else:
        values |= {"rope_theta": text.number("rope_local_base_freq", theta), "rope_scaling": None}
    return JsonObject(values, text.where)
