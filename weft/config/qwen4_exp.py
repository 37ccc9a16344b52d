"""Qwen4-Exp: Gated DeltaNet, attention over tokens that an indexer selects, residual streams, n-gram embeddings."""

from dataclasses import replace
from functools import partial

from weft.config.attention import AttentionConfig, read_attention
from weft.config.family import Family
from weft.config.gated_delta_net import GatedDeltaNetConfig, InProjLayout, read_gated_delta_net
from weft.config.indexed_attention import IndexedAttentionConfig, IndexerConfig
from weft.config.json_object import JsonObject
from weft.config.moe import read_moe
from weft.config.ngram import ngram_layers, read_ngrams
from weft.config.residual_streams import StreamsConfig
from weft.errors import ConfigError

WITH_NGRAMS = "ngram_linear_attention"
"""Weft's name of layers of ``linear_attention`` with n-gram embeddings."""


def qwen4_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Qwen4-Exp: every ``full_attention_interval``-th layer is indexed attention."""
    interval = text.integer("full_attention_interval", 4)
    return tuple("linear_attention" if (i + 1) % interval else "indexed_attention" for i in range(num_layers))


def separate_ngrams(text: JsonObject, types: tuple[str, ...]) -> tuple[str, ...]:
    """Rename the layers with n-gram embeddings."""
    layers = ngram_layers(text)
    if any(i < 0 or i >= len(types) or types[i] != "linear_attention" for i in layers):
        raise text.wrong("ple_layer_ids", "layers of linear_attention, counted from 1")
    return tuple(WITH_NGRAMS if i in layers else kind for i, kind in enumerate(types))


def read_qwen4_gated_delta_net(text: JsonObject) -> GatedDeltaNetConfig:
    """Read Gated DeltaNet, whose output gate is a SiLU or a sigmoid."""
    gate = text.text("output_gate_type", "silu")
    if gate not in ("silu", "swish", "sigmoid"):
        raise text.unsupported("output_gate_type", " for this architecture; supported are 'silu' and 'sigmoid'")
    return replace(read_gated_delta_net(text, in_proj=InProjLayout.SEPARATE), sigmoid_gate=gate == "sigmoid")


def read_indexed_attention(text: JsonObject) -> IndexedAttentionConfig:
    """Read gated attention and its indexer."""
    attention: AttentionConfig = read_attention(text, qk_norm=True, output_gate=True, partial_rotary_factor=1.0)
    heads, dim, pool = (text.integer(f"indexer_{key}") for key in ("n_heads", "head_dim", "compress_ratio"))
    budget = text.integer("indexer_budget")
    if text.integer("indexer_kv_heads") != 1:
        raise text.unsupported("indexer_kv_heads", "; all index heads share one key")
    if budget % pool:
        raise text.wrong("indexer_budget", f"a multiple of indexer_compress_ratio={pool}")
    if dim % pool:
        raise text.unsupported("indexer_compress_ratio", f"; it must divide indexer_head_dim={dim}")
    if attention.rope is None or attention.rope.rotary_dim > dim:
        raise ConfigError(f"{text.where}: the rotated part of a head is wider than indexer_head_dim={dim}")
    weights = text.integer("hidden_size") * (heads + 1) * dim
    return IndexedAttentionConfig(attention, IndexerConfig(heads, dim, pool, budget // pool, dim, weights))


def read_gated_streams(text: JsonObject) -> StreamsConfig:
    """Read the residual streams of Qwen4-Exp."""
    return StreamsConfig("gated", text.integer("hc_count", low=2), rank=text.integer("hc_lowrank"))


_KINDS = ("indexed_attention", WITH_NGRAMS, "linear_attention")
qwen4_exp = partial(
    Family,
    {
        "indexed_attention": {"self_attn": read_indexed_attention},
        WITH_NGRAMS: {"linear_attn": read_qwen4_gated_delta_net, "ple": read_ngrams},
        "linear_attention": {"linear_attn": read_qwen4_gated_delta_net},
    },
    layer_types=qwen4_layer_types,
    layer_type_names={"full_attention": "indexed_attention"},
    final_layer_types=separate_ngrams,
    norm_placement=dict.fromkeys(_KINDS, "streams"),
    streams=read_gated_streams,
    moe=partial(read_moe, shared_expert=True, always_renormalise=True),
    zero_centered_norm=True,
    mtp=True,
)
