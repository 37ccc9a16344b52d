"""GLM-5.3: Kimi Delta Attention, latent attention over tokens that an indexer selects, and residual streams."""

from dataclasses import replace
from functools import partial

from weft.config.family import Family
from weft.config.glm_vision import read_glm_vision
from weft.config.indexed_attention import IndexedLatentConfig, IndexerConfig
from weft.config.json_object import JsonObject
from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig, read_kimi_delta
from weft.config.model import Multipliers
from weft.config.moe import ClampedSwiGLU, MoeConfig, read_kimi_moe
from weft.config.residual_streams import StreamsConfig

SHARED = "shared_indexed_attention"
"""Weft's name of layers of ``indexed_attention`` that share the selection of an earlier layer."""

_KEYS = {"n_routed_experts": "num_experts"}


def glm5_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of GLM-5.3: every fourth layer is indexed attention."""
    return tuple("linear_attention" if i % 4 != 3 else "indexed_attention" for i in range(num_layers))


def separate_shared(text: JsonObject, types: tuple[str, ...]) -> tuple[str, ...]:
    """Rename the layers of indexed attention that have no indexer."""
    kinds = zip(types, _indexer_modes(text, len(types)), strict=True)
    found = tuple(SHARED if kind == ("indexed_attention", "shared") else kind[0] for kind in kinds)
    if next((kind for kind in found if kind != "linear_attention"), None) == SHARED:
        raise text.wrong("indexer_types", "'full' for the first layer of indexed attention: it has no earlier indexer")
    return found


def _indexer_modes(text: JsonObject, num_layers: int) -> list[str]:
    """``full`` or ``shared`` for each layer: a list, a pattern of letters, or a frequency and an offset."""
    modes = text.raw("indexer_types") or text.raw("index_topk_pattern")
    if modes is None:
        every, offset = max(text.integer("index_topk_freq", 1, low=0), 1), text.integer("index_skip_topk_offset", 2)
        return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
    names = {"F": "full", "S": "shared"} if isinstance(modes, str) else {"full": "full", "shared": "shared"}
    if not isinstance(modes, (str, list)) or len(modes) != num_layers or not set(modes) <= set(names):
        key = "indexer_types" if text.given("indexer_types") else "index_topk_pattern"
        raise text.wrong(key, f"'full' or 'shared' for each of {num_layers} layers")
    return [names[mode] for mode in modes]


def read_floored_kimi_delta(text: JsonObject) -> KimiDeltaConfig:
    """Read Kimi Delta Attention of GLM-5.3: decays are bounded unless ``linear_lower_bound`` is null."""
    nested = text.object("linear_attn_config")
    floor = text.raw("linear_lower_bound")
    if nested is not None:
        floor = nested.raw("gate_lower_bound") if nested.given("gate_lower_bound") else floor
        floor = -5.0 if floor is None and nested.boolean("safe_gate", True) else floor
    floor = 0.0 if floor is None else floor
    if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not -100.0 <= floor <= 0.0:
        raise text.wrong("linear_lower_bound", "a number from -100 to 0")
    return replace(read_kimi_delta(text), gate_floor=float(floor), flat_decay=True)


def read_indexed_latent(text: JsonObject, *, shares: bool) -> IndexedLatentConfig:
    """Read latent attention without a rotated part, and its indexer."""
    for key, wanted in (("qk_rope_head_dim", 0), ("attention_bias", False), ("index_kpool_always_select_tail", True)):
        if text.given(key) and text.raw(key) != wanted:
            raise text.unsupported(key, f" for this architecture; supported is {wanted!r}")
    heads = text.integer("num_attention_heads")
    if text.integer("num_key_value_heads", heads) != heads:
        raise text.unsupported("num_key_value_heads", ", since all heads share one latent; leave it out")
    query_rank = text.integer("q_lora_rank")
    latent = LatentAttentionConfig(
        num_heads=heads,
        key_dim=text.integer("qk_nope_head_dim"),
        shared_dim=0,
        value_dim=text.integer("v_head_dim"),
        rank=text.integer("kv_lora_rank"),
        query_rank=query_rank,
        norm_eps=text.number("rms_norm_eps"),
    )
    return IndexedLatentConfig(latent, _read_indexer(text, query_rank), shares)


def _read_indexer(text: JsonObject, query_rank: int) -> IndexerConfig:
    heads, dim, pool = (text.integer(key) for key in ("index_n_heads", "index_head_dim", "index_kpool"))
    budget = text.integer("index_topk")
    if budget % pool:
        raise text.wrong("index_topk", f"a multiple of index_kpool={pool}")
    if dim % pool:
        raise text.unsupported("index_kpool", f"; it must divide index_head_dim={dim}")
    hidden = text.integer("hidden_size")
    weights = query_rank * heads * dim + hidden * (2 * dim + heads)
    return IndexerConfig(heads, dim, pool, budget // pool, 2 * dim, weights)


def read_glm5_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts of GLM-5.3: those of DeepSeek-V3, with clamped activations."""
    limit = text.number("swiglu_limit")
    return replace(read_kimi_moe(text, num_layers), clamped=ClampedSwiGLU(1.0, limit, up_offset=0.0))


def glm5_multipliers(text: JsonObject) -> Multipliers:
    """Multipliers of GLM-5.3: dense MLPs have clamped activations too."""
    return Multipliers(swiglu_limit=text.number("swiglu_limit"))


def read_sinkhorn_streams(text: JsonObject) -> StreamsConfig:
    """Read the residual streams of GLM-5.3."""
    return StreamsConfig(
        "sinkhorn",
        text.integer("hc_mult"),
        iterations=text.integer("hc_sinkhorn_iters"),
        eps=text.number("hc_eps", open_low=False),
    )


GLM5_NEXT = Family(
    {
        "indexed_attention": {"self_attn": partial(read_indexed_latent, shares=False)},
        SHARED: {"self_attn": partial(read_indexed_latent, shares=True)},
        "linear_attention": {"self_attn": read_floored_kimi_delta},
    },
    layer_types=glm5_layer_types,
    layer_type_names={"full_attention": "indexed_attention"},
    final_layer_types=separate_shared,
    norm_placement=dict.fromkeys(("indexed_attention", SHARED, "linear_attention"), "streams"),
    streams=read_sinkhorn_streams,
    multipliers=glm5_multipliers,
    moe=read_glm5_moe,
    multimodal=True,
    vision=read_glm_vision,
    mtp=True,
    keys=_KEYS,
)
