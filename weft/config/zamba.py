"""Zamba (arXiv 2405.16712) and Zamba2 (arXiv 2411.15242): Mamba with blocks of attention and MLP that layers share."""

from collections.abc import Callable
from dataclasses import replace

from weft.config.attention import AttentionConfig, read_attention
from weft.config.family import Family
from weft.config.json_object import JsonObject
from weft.config.mamba import read_headed_mamba
from weft.config.mamba2 import Mamba2Config
from weft.config.mamba_families import read_nemotron_mamba2
from weft.config.shared_block import SharedBlockConfig

HYBRID = "hybrid"
"""Type of layers with a shared block before Mamba."""

SHARED_BLOCK = "shared_block"
"""The block's module in such a layer."""


def zamba2_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Zamba2-2.7B, which transformers assumes for every other model as well."""
    linear = ["linear_attention"]
    types = linear + (linear * 5 + [HYBRID]) * 7 + linear * 4 + [HYBRID] + linear * 3 + [HYBRID] + linear * 2
    if len(types) != num_layers:
        raise text.wrong("num_hidden_layers", f"{len(types)}, or layers_block_type with the type of every layer")
    return tuple(types)


def zamba_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Zamba: a shared block in the third layer, and then every ``attn_layer_period`` layers."""
    period, offset = text.integer("attn_layer_period"), text.integer("attn_layer_offset", low=0)
    later = [HYBRID if i % period == offset else "linear_attention" for i in range(num_layers - 3)]
    return ("linear_attention", "linear_attention", HYBRID, *later)


def read_block_attention(text: JsonObject, *, rotary: bool) -> AttentionConfig:
    """Read attention over hidden states and embeddings. Scores are divided by the root of half a head's size."""
    width, heads = 2 * text.integer("hidden_size"), text.integer("num_attention_heads")
    if text.integer("attention_hidden_size", width) != width:
        raise text.unsupported("attention_hidden_size", f"; supported is twice hidden_size, {width}")
    if width % heads:
        raise text.wrong("num_attention_heads", f"a divisor of twice hidden_size, {width}")
    given = JsonObject({"head_dim": width // heads} | text.values, text.where)
    attention = read_attention(given, qkv_bias=False, rotary=rotary)
    return replace(attention, scale=(attention.head_dim / 2) ** -0.5, input_size=width)


def hybrid_layers(text: JsonObject, default: Callable[[JsonObject, int], tuple[str, ...]]) -> tuple[int, ...]:
    """The layers with a shared block. ``default``: see ``Family.layer_types``."""
    types = text.raw("layer_types") or default(text, text.integer("num_hidden_layers"))
    return tuple(i for i, name in enumerate(types) if name == HYBRID)


def _read_zamba_block(text: JsonObject) -> SharedBlockConfig:
    _check_ties(text)
    attention = read_block_attention(text, rotary=False)
    width = text.integer("intermediate_size")
    return SharedBlockConfig(hybrid_layers(text, zamba_layer_types), 1, attention, width)


def _check_ties(text: JsonObject) -> None:
    """Refuse separate embeddings: transformers then ties no blocks either."""
    if not text.boolean("tie_word_embeddings", True):
        raise text.unsupported("tie_word_embeddings", " with shared blocks; set it to true")


def _read_zamba2_block(text: JsonObject) -> SharedBlockConfig:
    _check_ties(text)
    attention = read_block_attention(text, rotary=text.boolean("use_mem_rope", False))
    if text.boolean("use_long_context", False):  # transformers says that it rescales the rotary base, and does not
        raise text.unsupported("use_long_context", "; set it to false to serve the original context length")
    rank = text.integer("adapter_rank")
    adapts = text.boolean("use_shared_attention_adapter", False)
    if adapts and attention.num_kv_heads != attention.num_heads:
        raise text.unsupported("num_key_value_heads", f" with adapters; supported is {attention.num_heads}")
    if adapts and attention.head_dim * attention.num_heads != attention.input_size:
        raise text.unsupported(
            "attention_head_dim", " with adapters; supported is twice hidden_size / num_attention_heads"
        )
    return SharedBlockConfig(
        layers=hybrid_layers(text, zamba2_layer_types),
        num_blocks=text.integer("num_mem_blocks"),
        attention=attention,
        intermediate_size=_intermediate_size(text),
        attention_rank=rank if adapts else 0,
        mlp_rank=rank,
    )


def _read_zamba2_mamba(text: JsonObject) -> Mamba2Config:
    """Read Mamba-2. The convolution always has a bias, and the output norm an epsilon of its own."""
    if not text.boolean("use_conv_bias", True):
        raise text.unsupported("use_conv_bias", "; supported is true")
    biases = {"mamba_proj_bias": text.boolean("mlp_bias", False)}
    geometry = read_nemotron_mamba2(JsonObject(text.values | biases, text.where))
    return replace(geometry, norm_eps=1e-5)


def _intermediate_size(text: JsonObject) -> int:
    return text.integer("intermediate_size", 4 * text.integer("hidden_size"))


ZAMBA = Family(
    {
        "linear_attention": {"mamba": read_headed_mamba},
        HYBRID: {SHARED_BLOCK: _read_zamba_block, "mamba": read_headed_mamba},
    },
    layer_types=zamba_layer_types,
    without_mlp=("linear_attention", HYBRID),
    norm_placement={HYBRID: "shared_block"},
    activation="gelu",
    keys={"layers_block_type": "layer_types", "attention_head_dim": "head_dim"},
)

ZAMBA2 = Family(
    {
        "linear_attention": {"mamba": _read_zamba2_mamba},
        HYBRID: {SHARED_BLOCK: _read_zamba2_block, "mamba": _read_zamba2_mamba},
    },
    layer_types=zamba2_layer_types,
    without_mlp=("linear_attention", HYBRID),
    norm_placement={HYBRID: "shared_block"},
    activation="gelu",
    mlp_bias="key",
    intermediate_size=_intermediate_size,
    keys={"layers_block_type": "layer_types", "n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups",
          "mamba_headdim": "mamba_d_head", "attention_head_dim": "head_dim", "add_bias_linear": "mlp_bias"},
)  # fmt: skip
