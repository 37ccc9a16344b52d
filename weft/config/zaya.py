"""ZAYA1: convolutional attention, an MLP as router, and a residual stream with learned scales."""

from functools import partial

from weft.config.attention import AttentionConfig, read_attention
from weft.config.convolutional_attention import ConvolutionalAttentionConfig
from weft.config.family import Family
from weft.config.json_object import JsonObject
from weft.config.moe import MoeConfig, read_experts
from weft.config.sliding_window import SlidingWindowConfig, read_sliding_window

FULL, SLIDING = "hybrid", "hybrid_sliding"
"""Types of layers: attention over all tokens, and over a window. Both have convolutions."""

_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
"""Rotary settings of a file without any, by layer type."""


def _read_heads(text: JsonObject, layer_type: str) -> AttentionConfig:
    """Read heads and rotary settings. Each layer type has settings of its own, which name the share of rotated
    dimensions."""
    if text.given("rope_scaling"):
        raise text.unsupported("rope_scaling", " for this architecture; use rope_parameters, with one entry per type")
    settings = text.object("rope_parameters")
    nested = settings.object(layer_type) if settings is not None else None
    if settings is not None and nested is None:
        raise text.wrong("rope_parameters", f"an object with an entry {layer_type!r}")
    if text.integer("head_dim") * text.integer("num_key_value_heads") % 2:
        raise text.wrong("head_dim", "an even number of value channels, half of which come from the token before")
    rope = nested.values if nested is not None else _ROPE[layer_type]
    own = {"rope_parameters": rope, "rope_theta": None, "partial_rotary_factor": None}
    return read_attention(JsonObject(text.values | own, text.where), partial_rotary_factor=1.0)


def read_zaya_attention(text: JsonObject, layer_type: str) -> ConvolutionalAttentionConfig:
    """Read attention with its convolutions. A head for logits with a bias is refused here."""
    if text.boolean("lm_head_bias", False):
        raise text.unsupported("lm_head_bias", "; set it to false")
    heads = partial(_read_heads, layer_type=layer_type)
    kernels = text.integer("cca_time0"), text.integer("cca_time1")
    mixer = heads(text) if layer_type == FULL else read_sliding_window(text, attention=heads)
    if isinstance(mixer, SlidingWindowConfig):
        return ConvolutionalAttentionConfig(mixer.attention, *kernels, mixer.window)
    return ConvolutionalAttentionConfig(mixer, *kernels)


def read_zaya_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts. A token has one expert or none, whose weight is its probability."""
    num_experts, top_k = read_experts(text)
    if top_k != 1:
        raise text.unsupported("num_experts_per_tok", " for this architecture; supported is 1")
    return MoeConfig(
        num_experts,
        top_k,
        text.integer("moe_intermediate_size"),
        norm_topk_prob=False,
        shared_expert_intermediate_size=None,
        sparse_layers=frozenset(range(num_layers)),
        router_size=text.integer("router_hidden_size"),
    )


ZAYA = Family(
    {kind: {"self_attn": partial(read_zaya_attention, layer_type=kind)} for kind in (FULL, SLIDING)},
    layer_types=lambda _, num_layers: (FULL,) * num_layers,
    moe=read_zaya_moe,
    norm_placement=dict.fromkeys((FULL, SLIDING), "scaled"),
)
