"""The families with Mamba layers: entries of ``FAMILIES``, and readers of their own keys."""

import math
from dataclasses import replace
from functools import partial

from weft.config.attention import AttentionConfig, read_attention, read_head_dim
from weft.config.family import Family
from weft.config.json_object import JsonObject
from weft.config.lightning_attention import read_lightning_attention
from weft.config.mamba import read_mamba
from weft.config.mamba2 import Mamba2Config, read_mamba2
from weft.config.model import Multipliers, ResidualWeights
from weft.config.moe import MoeConfig, SigmoidRouting, read_experts
from weft.errors import UnsupportedModelError


def bamba_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Bamba: ``attn_layer_indices`` are full attention (no layer if the key is missing), the others
    Mamba-2."""
    attention = set(text.integers("attn_layer_indices"))
    return tuple("full_attention" if i in attention else "linear_attention" for i in range(num_layers))


def read_granite_attention(text: JsonObject) -> AttentionConfig:
    """Read attention of Granite 4. It rotates if ``position_embedding_type`` says so; ``attention_multiplier`` scales
    the scores."""
    kind = text.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise text.unsupported("position_embedding_type", "; supported are 'rope' and 'nope' (null)")
    attention = read_attention(text, rotary=kind == "rope")
    return replace(attention, scale=text.number("attention_multiplier", 1.0))


def read_granite_multipliers(text: JsonObject) -> Multipliers:
    """Read the multipliers of Granite 4. ``logits_scaling`` is a divisor."""
    return Multipliers(
        embedding=text.number("embedding_multiplier", 1.0),
        residual=text.number("residual_multiplier", 1.0),
        logits=1.0 / text.number("logits_scaling", 1.0),
    )


def read_granite_moe(text: JsonObject, num_layers: int) -> MoeConfig | None:
    """Read the experts of Granite 4. ``intermediate_size`` is the width of an expert; every token uses the shared MLP.
    Without experts the shared MLP is the MLP."""
    if not text.integer("num_experts", low=0):
        return None
    num_experts, top_k = read_experts(text)
    width, shared = text.integer("intermediate_size"), text.integer("shared_intermediate_size")
    every_layer = frozenset(range(num_layers))
    return MoeConfig(num_experts, top_k, width, True, shared, every_layer, shared_expert_gate=False)


_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def nemotron_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Nemotron-H: ``hybrid_override_pattern`` has a letter for every layer."""
    pattern = text.text("hybrid_override_pattern")
    if len(pattern) != num_layers or not set(pattern) <= set(_PATTERN):
        raise text.wrong("hybrid_override_pattern", f"num_hidden_layers={num_layers} letters of {''.join(_PATTERN)}")
    return tuple(_PATTERN[letter] for letter in pattern)


def read_nemotron_mamba2(text: JsonObject) -> Mamba2Config:
    """Read Mamba-2 of Nemotron-H. Time steps are at least ``time_step_min``, without an upper bound."""
    low = text.number("time_step_min", 0.001, open_low=False)
    return read_mamba2(JsonObject(text.values | {"time_step_limit": [low, math.inf]}, text.where))


def read_nemotron_moe(text: JsonObject, num_layers: int) -> MoeConfig | None:
    """Read the experts of Nemotron-H: routing as in DeepSeek-V3, in layers of type ``moe``."""
    types = text.raw("layer_types") or nemotron_layer_types(text, num_layers)
    sparse = frozenset(i for i, kind in enumerate(types) if kind == "moe")
    if not sparse:
        return None
    latent_size = text.integer("moe_latent_size") if text.given("moe_latent_size") else None
    if latent_size is not None and text.boolean("mlp_bias", False):
        raise text.unsupported("mlp_bias", " with moe_latent_size; supported is false")
    num_experts, top_k = read_experts(text)
    groups, top_groups = text.integer("n_group", 1), text.integer("topk_group", 1)
    if num_experts % groups or top_groups > groups or top_k > top_groups * (num_experts // groups):
        raise text.wrong("n_group", f"a divisor of the {num_experts} experts that leaves {top_k} in topk_group groups")
    return MoeConfig(
        num_experts,
        top_k,
        text.integer("moe_intermediate_size"),
        text.boolean("norm_topk_prob", True),
        text.integer("moe_shared_expert_intermediate_size"),
        sparse,
        shared_expert_gate=False,
        sigmoid=SigmoidRouting(True, groups, top_groups, text.number("routed_scaling_factor", 1.0)),
        latent_size=latent_size,
    )


def read_falcon_h1_attention(text: JsonObject) -> AttentionConfig:
    """Read attention of Falcon-H1. ``key_multiplier`` scales keys, and so the scores."""
    attention = read_attention(text)
    return replace(
        attention,
        scale=attention.head_dim**-0.5 * text.number("key_multiplier", 1.0),
        in_multiplier=text.number("attention_in_multiplier", 1.0, open_low=False),
        out_multiplier=text.number("attention_out_multiplier", 1.0, open_low=False),
    )


def read_falcon_h1_multipliers(text: JsonObject) -> Multipliers:
    """Read the multipliers of Falcon-H1. ``mlp_multipliers`` are those of gate and output."""
    gate, down = text.numbers("mlp_multipliers", 2) or (1.0, 1.0)
    return Multipliers(
        embedding=text.number("embedding_multiplier", 1.0),
        logits=text.number("lm_head_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _periodic(text: JsonObject, what: str, num_layers: int, period: int, offset: int) -> frozenset[int]:
    """The layers given by ``{what}_layer_period`` and ``{what}_layer_offset``."""
    period = text.integer(f"{what}_layer_period", period)
    offset = text.integer(f"{what}_layer_offset", offset, low=0)
    if offset >= period:
        raise text.wrong(f"{what}_layer_offset", f"an integer below {what}_layer_period={period}")
    return frozenset(range(offset, num_layers, period))


def jamba_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Jamba: attention at every ``attn_layer_period``-th layer from ``attn_layer_offset`` on, else
    Mamba."""
    attention = _periodic(text, "attn", num_layers, 8, 4)
    return tuple("full_attention" if i in attention else "linear_attention" for i in range(num_layers))


def read_jamba_moe(text: JsonObject, num_layers: int) -> MoeConfig | None:
    """Read the experts of Jamba: as wide as the MLP, in every ``expert_layer_period``-th layer. A single expert is a
    dense MLP."""
    if text.integer("num_experts") == 1:
        return None
    num_experts, top_k = read_experts(text)
    sparse = _periodic(text, "expert", num_layers, 2, 1)
    return MoeConfig(num_experts, top_k, text.integer("intermediate_size"), False, None, sparse)


def minimax_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of MiniMax: ``attn_type_list`` (1: full attention, 0: lightning attention). Without it they
    alternate."""
    kinds = text.integers("attn_type_list") or tuple((i + 1) % 2 for i in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {0, 1}:
        raise text.wrong("attn_type_list", f"num_hidden_layers={num_layers} zeros and ones")
    return tuple("full_attention" if kind else "linear_attention" for kind in kinds)


def read_minimax_attention(text: JsonObject) -> AttentionConfig:
    """Read attention of MiniMax. ``rotary_dim`` is the rotated size of a head."""
    if text.given("sliding_window"):
        raise text.unsupported("sliding_window", " for this architecture; set it to null")
    if not text.given("rotary_dim"):
        return read_attention(text, qkv_bias=False)
    share = text.integer("rotary_dim") / read_head_dim(text, text.integer("num_attention_heads"))
    partial_text = JsonObject(text.values | {"partial_rotary_factor": share}, text.where)
    return read_attention(partial_text, qkv_bias=False, partial_rotary_factor=share)


def read_minimax_moe(text: JsonObject, num_layers: int) -> MoeConfig:
    """Read the experts of MiniMax: in every layer, ``intermediate_size`` wide."""
    if text.given("shared_intermediate_size") and text.integer("shared_intermediate_size", low=0):
        raise UnsupportedModelError(
            f"{text.where}: shared_intermediate_size={text.raw('shared_intermediate_size')!r} (a shared expert) is not "
            "supported for this architecture; supported is 0"
        )
    num_experts, top_k = read_experts(text)
    return MoeConfig(num_experts, top_k, text.integer("intermediate_size"), True, None, frozenset(range(num_layers)))


def read_residual_weights(text: JsonObject) -> dict[str, ResidualWeights]:
    """Read ``full_attn_alpha_factor`` and its relatives."""
    if not text.boolean("postnorm", True):
        raise UnsupportedModelError(f"{text.where}: postnorm=false is not supported; supported is true")

    def weight(name: str) -> float:
        return text.number(f"{name}_factor", 1.0, open_low=False)

    mlp = weight("mlp_alpha"), weight("mlp_beta")
    return {
        kind: ResidualWeights(weight(f"{name}_alpha"), weight(f"{name}_beta"), *mlp)
        for kind, name in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"))
    }


_MINIMAX_KEYS = {
    f"layernorm_{own}_{factor}": f"{shared}_{factor}_factor"
    for own, shared in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
# MiniMax-Text (arXiv 2501.08313): lightning attention with a layer of full attention in eight, experts in all.
_MINIMAX_FAMILY = Family(
    {
        "full_attention": {"self_attn": read_minimax_attention},
        "linear_attention": {"self_attn": read_lightning_attention},
    },
    layer_types=minimax_layer_types,
    moe=read_minimax_moe,
    norm_placement={"full_attention": "stream", "linear_attention": "stream"},
    residual_weights=read_residual_weights,
    keys=_MINIMAX_KEYS,
)


_MAMBA2_KEYS = {"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state",
                "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "expand": "mamba_expand",
                "use_conv_bias": "mamba_conv_bias", "use_bias": "mamba_proj_bias",
                "layer_norm_epsilon": "rms_norm_eps"}  # fmt: skip

_NEMOTRON_KEYS = {"layers_block_type": "layer_types", "attention_head_dim": "head_dim",
                  "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head",
                  "ssm_state_size": "mamba_d_state", "n_groups": "mamba_n_groups",
                  "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias", "use_bias": "mamba_proj_bias",
                  "layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act",
                  "mamba_dt_min": "time_step_min", "n_routed_experts": "num_experts"}  # fmt: skip
_FALCON_MAMBA_KEYS = {"state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "expand": "mamba_expand",
                      "use_conv_bias": "mamba_conv_bias", "use_bias": "mamba_proj_bias",
                      "time_step_rank": "mamba_dt_rank", "intermediate_size": "mamba_d_inner",
                      "layer_norm_epsilon": "rms_norm_eps"}  # fmt: skip

MAMBA_FAMILIES: dict[str, Family] = {
    # Bamba: Mamba-2 with a few layers of full attention, dense MLPs.
    "BambaForCausalLM": Family(
        {
            "full_attention": {"self_attn": partial(read_attention, partial_rotary_factor=0.5)},
            "linear_attention": {"mamba": read_mamba2},
        },
        layer_types=bamba_layer_types,
        keys={"layers_block_type": "layer_types"},
        mlp_bias="key",
    ),
    # Granite 4: Mamba-2 with a few layers of attention without rotation, experts with a shared MLP.
    "GraniteMoeHybridForCausalLM": Family(
        {"full_attention": {"self_attn": read_granite_attention}, "linear_attention": {"mamba": read_mamba2}},
        layer_types=lambda _, num_layers: ("linear_attention",) * num_layers,
        moe=read_granite_moe,
        multipliers=read_granite_multipliers,
        intermediate_size=lambda text: text.integer("shared_intermediate_size"),
        keys={"layers_block_type": "layer_types"},
    ),
    # Nemotron-H (arXiv 2504.03624): layers of Mamba-2, attention, squared-ReLU MLPs or experts, one per layer.
    "NemotronHForCausalLM": Family(
        {
            "linear_attention": {"mamba": read_nemotron_mamba2},
            "full_attention": {"self_attn": partial(read_attention, qkv_bias=False, rotary=False)},
            "mlp": {},
            "moe": {},
        },
        layer_types=nemotron_layer_types,
        without_mlp=("linear_attention", "full_attention"),
        moe=read_nemotron_moe,
        activation="relu2",
        mlp_bias="key",
        keys=_NEMOTRON_KEYS,
    ),
    # Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in every layer, dense MLPs, many multipliers.
    "FalconH1ForCausalLM": Family(
        {"hybrid": {"mamba": read_mamba2, "self_attn": read_falcon_h1_attention}},
        layer_types=lambda _, num_layers: ("hybrid",) * num_layers,
        multipliers=read_falcon_h1_multipliers,
        mlp_bias="key",
        keys={"projectors_bias": "mamba_out_bias"},
    ),
    # Jamba (arXiv 2403.19887): Mamba with a few layers of attention without rotation, experts in every other layer.
    "JambaForCausalLM": Family(
        {
            "full_attention": {"self_attn": partial(read_attention, qkv_bias=False, rotary=False)},
            "linear_attention": {"mamba": partial(read_mamba, norm_weights=True)},
        },
        layer_types=jamba_layer_types,
        moe=read_jamba_moe,
    ),
    # FalconMamba (arXiv 2410.05355): Mamba alone, with plain norms over B, C and the time steps; no KV cache.
    "FalconMambaForCausalLM": Family(
        {"linear_attention": {"mamba": partial(read_mamba, norm_weights=False)}},
        layer_types=lambda _, num_layers: ("linear_attention",) * num_layers,
        without_mlp=("linear_attention",),
        intermediate_size=lambda _: 0,
        keys=_FALCON_MAMBA_KEYS,
    ),
    # Mamba (arXiv 2312.00752): FalconMamba without the norms over B, C and the time steps.
    "MambaForCausalLM": Family(
        {"linear_attention": {"mamba": partial(read_mamba, norm_weights=None)}},
        layer_types=lambda _, num_layers: ("linear_attention",) * num_layers,
        without_mlp=("linear_attention",),
        intermediate_size=lambda _: 0,
        keys=_FALCON_MAMBA_KEYS,
    ),
    "MiniMaxForCausalLM": _MINIMAX_FAMILY,
    # Mamba-2 alone (arXiv 2405.21060): no attention, no MLP, no KV cache.
    "Mamba2ForCausalLM": Family(
        {"linear_attention": {"mamba": read_mamba2}},
        layer_types=lambda _, num_layers: ("linear_attention",) * num_layers,
        without_mlp=("linear_attention",),
        intermediate_size=lambda _: 0,
        keys=_MAMBA2_KEYS,
    ),
}
