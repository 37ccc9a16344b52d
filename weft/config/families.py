"""Architectures that Weft runs, one entry each.

Job: the table from the class name in ``config.json`` to the properties that follow from that name alone. A new
architecture is registered here and in ``models/weight_names.py``; ``defaults.json`` has the keys that its
``config.json`` may leave out. Does not know: values of a checkpoint.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from weft.config.attention import AttentionConfig, read_attention
from weft.config.family import Family, Mixers
from weft.config.gated_delta_net import InProjLayout, read_gated_delta_net, read_olmo_hybrid_gated_delta_net
from weft.config.glm5_next import GLM5_NEXT
from weft.config.inkling import INKLING
from weft.config.inkling2 import INKLING2
from weft.config.json_object import JsonObject
from weft.config.kimi import (
    kimi_layer_types,
    ling_layer_types,
    read_bounded_kimi_delta,
    read_gated_latent_attention,
    read_kimi_delta,
    read_latent_attention,
)
from weft.config.lfm3 import LFM3
from weft.config.mamba_families import MAMBA_FAMILIES
from weft.config.model import Multipliers
from weft.config.moe import read_gpt_oss_moe, read_kimi_moe, read_lfm2_moe, read_moe, read_renormalised_moe
from weft.config.qwen4_exp import qwen4_exp
from weft.config.recurrent_gemma import RECURRENT_GEMMA
from weft.config.short_conv import read_short_conv
from weft.config.sliding_window import (
    all_sliding,
    all_sliding_if_used,
    alternating_from_sliding,
    read_sliding_window,
    sliding_every_other,
    sliding_from_layer,
)
from weft.config.vision import VisionTokens, read_vision
from weft.config.zamba import ZAMBA, ZAMBA2
from weft.config.zaya import ZAYA


def interval_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Qwen3-Next: every ``full_attention_interval``-th layer is full attention, the others are linear
    attention."""
    interval = text.integer("full_attention_interval")
    return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))


def olmo_hybrid_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of OLMo-Hybrid: every fourth layer is full attention, and the last one if there are fewer."""
    types = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)]
    if num_layers < 4:
        types[-1] = "full_attention"
    return tuple(types)


def lfm2_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of LFM2: ``full_attn_idxs`` are full attention (all layers if the key is missing), the others
    convolutions."""
    given = text.given("full_attn_idxs")
    attention = set(text.integers("full_attn_idxs")) if given else set(range(num_layers))
    return tuple("full_attention" if i in attention else "conv" for i in range(num_layers))


def read_qwen2_moe_attention(text: JsonObject) -> AttentionConfig:
    """Read attention as in Qwen2, except that ``qkv_bias`` can switch off the bias."""
    return read_attention(text, qkv_bias=text.boolean("qkv_bias", True))


def lfm2_intermediate_size(text: JsonObject) -> int:
    """Width of the MLP: two thirds of ``intermediate_size``, rounded up, unless ``block_auto_adjust_ff_dim`` is off."""
    size = text.integer("intermediate_size")
    if not text.boolean("block_auto_adjust_ff_dim", True):
        return size
    multiple = text.integer("block_multiple_of", 256)
    size = int(text.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


_GEMMA3_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def gemma3_layer_types(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layer types of Gemma 3: every ``sliding_window_pattern``-th layer is full attention."""
    pattern = text.integer("sliding_window_pattern", 6)
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers))


def gemma3_multipliers(text: JsonObject) -> Multipliers:
    """Multipliers of Gemma 3: embeddings are scaled by the square root of their width."""
    return Multipliers(embedding=text.integer("hidden_size") ** 0.5)


def read_gemma3_attention(text: JsonObject, layer_type: str) -> AttentionConfig:
    """Read attention of Gemma 3. Layers of full attention rotate slowly, with scaling if given; layers with a window
    rotate fast."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if text.raw(key):
            raise text.unsupported(key, " for this architecture; leave it out")
    attention = read_attention(_with_rope_of(text, layer_type), qk_norm=True)
    return replace(attention, scale=text.number("query_pre_attn_scalar") ** -0.5)


def _with_rope_of(text: JsonObject, layer_type: str) -> JsonObject:
    """The config with the rotary settings of one layer type. Newer files nest these settings, older files have separate
    keys."""
    values, theta = dict(text.values), _GEMMA3_THETA[layer_type]
    nested = text.object("rope_parameters")
    if nested is not None:
        settings = nested.object(layer_type)
        values["rope_parameters"] = {"rope_theta": theta} | (settings.values if settings is not None else {})
    elif layer_type == "full_attention":
        values["rope_theta"] = text.number("rope_theta", theta)
    else:
        values |= {"rope_theta": text.number("rope_local_base_freq", theta), "rope_scaling": None}
    return JsonObject(values, text.where)


_GEMMA3_IN_WINDOWS = partial(read_gemma3_attention, layer_type="sliding_attention")

_KIMI_KEYS = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
              "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
              "num_shared_experts": "n_shared_experts"}  # fmt: skip
_LFM2_KEYS = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
_LFM2_MIXERS: Mixers = {
    "full_attention": {"self_attn": partial(read_attention, qkv_bias=False, qk_norm=True)},
    "conv": {"conv": read_short_conv},
}


def _windowed(attention: Callable[[JsonObject], AttentionConfig], *, switched: bool = True) -> Mixers:
    """Layers of full attention, and the same layers with a window."""
    window = partial(read_sliding_window, attention=attention, switched=switched)
    return {"full_attention": {"self_attn": attention}, "sliding_attention": {"self_attn": window}}


_QK_NORM_ATTENTION = _windowed(partial(read_attention, qk_norm=True))
_GATED_ATTENTION = partial(read_attention, qk_norm=True, output_gate=True, partial_rotary_factor=0.25)


def _gated_delta_nets(in_proj: InProjLayout) -> Mixers:
    """Layers of Gated DeltaNet, and layers of gated full attention."""
    linear_attention = partial(read_gated_delta_net, in_proj=in_proj)
    return {"full_attention": {"self_attn": _GATED_ATTENTION}, "linear_attention": {"linear_attn": linear_attention}}


_hybrid = partial(Family, layer_types=interval_layer_types, zero_centered_norm=True, mtp=True)
_qwen3_5 = partial(_hybrid, _gated_delta_nets(InProjLayout.SEPARATE))
_QWEN3_5_EXPERTS = partial(read_moe, shared_expert=True, always_renormalise=True)
_qwen3_5_moe = partial(_qwen3_5, moe=_QWEN3_5_EXPERTS)
_qwen3_5_vision = partial(
    read_vision,
    tokens=VisionTokens(image=248056, video=248057, start=248053, end=248054),
    mrope_section=(11, 11, 10),
    deepstack=False,
)
_qwen3_vl = partial(
    Family,
    mixers={"full_attention": {"self_attn": partial(read_attention, qk_norm=True)}},
    multimodal=True,
    vision=partial(
        read_vision,
        tokens=VisionTokens(image=151655, video=151656, start=151652, end=151653),
        mrope_section=(24, 20, 20),
        deepstack=True,
    ),
)

FAMILIES: dict[str, Family] = {
    # Llama 3 (arXiv 2407.21783): grouped-query attention and a dense SwiGLU MLP. Mistral and Qwen2 are alike.
    "LlamaForCausalLM": Family({"full_attention": {"self_attn": read_attention}}, mlp_bias="key"),
    "MistralForCausalLM": Family(
        _windowed(partial(read_attention, qkv_bias=False), switched=False), layer_types=all_sliding
    ),
    "Qwen2ForCausalLM": Family(_windowed(partial(read_attention, qkv_bias=True)), layer_types=sliding_from_layer),
    # Qwen2-MoE (arXiv 2407.10671): Qwen2's block with routed experts and a gated shared one.
    "Qwen2MoeForCausalLM": Family(
        _windowed(read_qwen2_moe_attention),
        layer_types=sliding_every_other,
        moe=partial(read_moe, shared_expert=True),
    ),
    # Qwen3 (arXiv 2505.09388): Llama's block with an RMSNorm on every query and key head; no shared expert.
    "Qwen3ForCausalLM": Family(_QK_NORM_ATTENTION, layer_types=sliding_from_layer),
    "Qwen3MoeForCausalLM": Family(_QK_NORM_ATTENTION, layer_types=all_sliding_if_used, moe=read_moe),
    # LFM2 (arXiv 2511.23404): double-gated short convolutions between layers of full attention.
    "Lfm2ForCausalLM": Family(
        _LFM2_MIXERS,
        layer_types=lfm2_layer_types,
        keys=_LFM2_KEYS | {"block_ff_dim": "intermediate_size"},
        intermediate_size=lfm2_intermediate_size,
    ),
    "Lfm2MoeForCausalLM": Family(_LFM2_MIXERS, layer_types=lfm2_layer_types, moe=read_lfm2_moe, keys=_LFM2_KEYS),
    # LFM3: short convolutions, windows and full attention, norms on both sides of each block.
    "Lfm3ForCausalLM": LFM3,
    # Inkling: windows and full attention with a relative position bias, short convolutions, experts.
    "InklingForCausalLM": INKLING,
    # Inkling 2: the same with clipped heads, gates, sinks by token, dynamic convolutions, and residuals over blocks.
    "Inkling2ForCausalLM": INKLING2,
    # OLMo-Hybrid: three Gated DeltaNet layers to one full-attention layer, whose norms come after it.
    "OlmoHybridForCausalLM": Family(
        {
            "full_attention": {"self_attn": partial(read_attention, qk_norm=True, qk_norm_spans_heads=True)},
            "linear_attention": {"linear_attn": read_olmo_hybrid_gated_delta_net},
        },
        layer_types=olmo_hybrid_layer_types,
        norm_placement={"full_attention": "post"},
    ),
    # Gemma 3 (arXiv 2503.19786): five layers with a sliding window to one of full attention, norms on both sides.
    "Gemma3ForCausalLM": Family(
        {
            "full_attention": {"self_attn": partial(read_gemma3_attention, layer_type="full_attention")},
            "sliding_attention": {"self_attn": partial(read_sliding_window, attention=_GEMMA3_IN_WINDOWS)},
        },
        layer_types=gemma3_layer_types,
        norm_placement={"full_attention": "sandwich", "sliding_attention": "sandwich"},
        multipliers=gemma3_multipliers,
        activation="gelu_pytorch_tanh",
        zero_centered_norm=True,
        keys={"hidden_activation": "hidden_act"},
    ),
    # RecurrentGemma (arXiv 2404.07839): two layers of RG-LRU to one with a sliding window.
    "RecurrentGemmaForCausalLM": RECURRENT_GEMMA,
    # gpt-oss (arXiv 2508.10925): windows and full attention in turn, all with sinks; experts with biases.
    "GptOssForCausalLM": Family(
        _windowed(partial(read_attention, sinks=True), switched=False),
        layer_types=alternating_from_sliding,
        moe=read_gpt_oss_moe,
    ),
    # Kimi-Linear (arXiv 2510.26692): three layers of Kimi Delta Attention to one of latent attention, experts.
    "KimiLinearForCausalLM": Family(
        {"full_attention": {"self_attn": read_latent_attention}, "linear_attention": {"self_attn": read_kimi_delta}},
        layer_types=kimi_layer_types,
        moe=read_kimi_moe,
        keys=_KIMI_KEYS,
    ),
    # Ling 3.0: five layers of Kimi Delta Attention with bounded decays to one of gated latent attention, experts.
    "BailingHybridForCausalLM": Family(
        {
            "full_attention": {"self_attn": read_gated_latent_attention},
            "linear_attention": {"self_attn": read_bounded_kimi_delta},
        },
        layer_types=ling_layer_types,
        moe=read_kimi_moe,
        mtp=True,
        keys=_KIMI_KEYS | {"num_mtp_layers": "num_nextn_predict_layers"},
    ),
    # GLM-5.3: Kimi Delta Attention, latent attention over selected tokens, residual streams, experts.
    "Glm5NextForConditionalGeneration": GLM5_NEXT,
    # Qwen3-Next: three Gated DeltaNet layers to one of gated full attention, experts. Qwen3.5 stores it otherwise.
    "Qwen3NextForCausalLM": _hybrid(_gated_delta_nets(InProjLayout.GROUPED), moe=partial(read_moe, shared_expert=True)),
    "Qwen3_5ForCausalLM": _qwen3_5(),
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe(),
    "Qwen3_5ForConditionalGeneration": _qwen3_5(multimodal=True, vision=_qwen3_5_vision),
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe(multimodal=True, vision=_qwen3_5_vision),
    # Qwen4-Exp: Gated DeltaNet, attention over selected tokens, residual streams, n-gram embeddings, experts.
    "Qwen4ExpForCausalLM": qwen4_exp(),
    "Qwen4ExpForConditionalGeneration": qwen4_exp(multimodal=True, vision=_qwen3_5_vision),
    # Qwen3-VL (arXiv 2511.21631): Qwen3's decoder with a vision tower.
    "Qwen3VLForConditionalGeneration": _qwen3_vl(),
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl(moe=read_renormalised_moe),
    **MAMBA_FAMILIES,
    # Zamba (arXiv 2405.16712): Mamba with heads; some layers first run a block of attention and MLP, which they share.
    "ZambaForCausalLM": ZAMBA,
    # Zamba2 (arXiv 2411.15242): Mamba-2; some layers first run one of few blocks of attention and MLP.
    "Zamba2ForCausalLM": ZAMBA2,
    # ZAYA1: convolutional attention, one expert per token, chosen by an MLP; scaled residuals.
    "ZayaForCausalLM": ZAYA,
}

OTHER_NAMES = {"MiniMaxText01ForCausalLM": "MiniMaxForCausalLM"}
"""Architecture names of published files whose keys and tensors equal those of another name."""
