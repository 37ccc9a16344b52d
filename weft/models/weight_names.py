"""The checkpoints' names of the decoder's modules, by architecture: the only difference of models beyond their config.

Does not know: anything that ``decoder.py`` and the config express.
"""

from dataclasses import replace

from weft.config.model import ModelConfig
from weft.config.wrappers import WRAPPERS
from weft.layers.weight import WeightTable

_ATTENTION: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_PLAIN = _ATTENTION | {"gate_up_proj": ("gate_proj", "up_proj")}
_ROUTER: dict[str, tuple[str, ...]] = {"router": ("gate",)}
_GATED_ROUTER: dict[str, tuple[str, ...]] = {"router": ("gate", "shared_expert_gate")}

_RECURRENT_GEMMA = WeightTable(  # whatever mixes tokens is the ``temporal_block``
    _PLAIN | {"in_proj": ("linear_y", "linear_x")},
    modules={
        "input_layernorm": "temporal_pre_norm",
        "post_attention_layernorm": "channel_pre_norm",
        "norm": "final_norm",
        "mlp": "mlp_block",
        "self_attn": "temporal_block",
        "recurrent": "temporal_block",
        "conv1d": "conv_1d",
        "out_proj": "linear_out",
    },
)
_LLAMA = WeightTable(_PLAIN, ignorable=("*.rotary_emb.inv_freq",))  # a buffer that early checkpoints saved along

# ``mtp.*`` is the multi-token-prediction head (``models/mtp.py``), ``model.visual.*`` the vision tower.
_QWEN3_5 = WeightTable(
    _PLAIN | _GATED_ROUTER | {"in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")},
    renames={"model.language_model.": "model."},
    ignorable=("mtp.*", "model.visual.*"),
)
_QWEN4_EXP = WeightTable(
    _QWEN3_5.packed
    | {
        "attn_hc.mix_down": ("input_mix_weight_down", "block_inject_weight"),
        "ffn_hc.mix_down": ("input_mix_weight_down", "block_inject_weight"),
        "norm.mix_down": ("input_mix_weight_down",),
        "mix_up": ("input_mix_weight_up",),
        "ple.in_proj": ("key_proj", "value_proj"),
    },
    renames=_QWEN3_5.renames,
    modules={"attn_hc": "attn_hyper_connection", "ffn_hc": "mlp_hyper_connection"},
    patterns={r"\.hyper_connection_mixer\.": ".norm.", r"\.ple_embedding\.ngram_embedding\.": ".ngram_embedding."},
    # Buffers, which follow from the geometry; the head and the tower where they do not run; and weights for adding an
    # output to the streams at their end, where there is none.
    ignorable=(
        *_QWEN3_5.ignorable, "*.layer_multipliers", "*.ngram_heads_vocab_sizes", "*.ngram_heads_offsets",
        "*.hyper_connection_mixer.block_inject_weight.*",
    ),
)
_QWEN3_VL = WeightTable(_PLAIN, renames={"model.language_model.": "model."}, ignorable=("model.visual.*",))

_LFM2 = WeightTable(
    _ATTENTION | _ROUTER | {"gate_up_proj": ("w1", "w3")},
    modules={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "norm": "embedding_norm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    },
)
_LFM3 = WeightTable(
    _LFM2.packed,
    modules={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "post_operator_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffn_norm",
        "norm": "embedding_norm",
        "mlp": "feed_forward",
        "down_proj": "w2",
    },
    aliases={"gate_proj": "g_proj"},
)
_INKLING = WeightTable(
    _PLAIN | _ROUTER | {"kv_conv": ("k_sconv.conv1d", "v_sconv.conv1d")},
    renames={"model.mtp.": "mtp."},
    patterns={
        r"\.embed_tokens\.embed_norm\.": ".embed_norm.",
        r"\.mlp\.shared_experts\.(?:shared_)?": ".mlp.experts.shared_",
    },
)
_INKLING2 = WeightTable(
    _ROUTER
    | {
        "in_proj": ("wq_du", "gate_attn", "wr_du", "attn_sink_proj", "wk_dv", "wv_dv"),
        "q_in_proj": ("wq_du", "gate_attn", "wr_du", "attn_sink_proj"),
        "k_in_proj": ("wk_dv", "k_sconv.weight_proj"),
        "v_in_proj": ("wv_dv", "v_sconv.weight_proj"),
        "kv_conv": ("k_sconv", "v_sconv"),
        "attn_norm": ("q_input_norm", "k_input_norm", "v_input_norm"),
        "attn.qkv": ("q_proj", "k_proj", "v_proj"),
    },
    renames=WRAPPERS["Inkling2ForConditionalGeneration"].renames,
    modules={"embed_tokens": "embed", "self_attn": "attn", "o_proj": "wo_ud"},
    patterns={
        r"\.weight_proj$": ".weight_proj.weight",
        r"\.(attn|mlp)_sconv\.weight$": r".\1_sconv.conv1d.weight",
        r"\.gate\.bias$": ".gate.e_score_correction_bias",
    },
    aliases={"self_attn": "attn"},  # of transformers, in lists of modules that are not quantised
)
_OLMO_HYBRID = WeightTable(
    _PLAIN
    | {
        "in_proj": ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    },
    modules={"out_proj": "o_proj"},
    aliases={  # of published checkpoints
        "o_norm": "norm",
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
)
_KIMI_LINEAR = WeightTable(
    {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "router": ("gate",),
        "in_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
        "q_kv_proj": ("q_proj", "kv_a_proj_with_mqa"),
        "q_a_kv_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    },
    modules={"out_proj": "o_proj"},
    aliases={
        "block_sparse_moe": "mlp",
        "shared_experts": "shared_expert",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
        "o_norm": "norm",
    },
)
_GLM5_NEXT = WeightTable(
    _KIMI_LINEAR.packed | {"indexer.in_proj": ("wk", "compress_gate", "weights_proj")},
    renames={"model.language_model.": "model."},
    modules=_KIMI_LINEAR.modules,
    aliases=_KIMI_LINEAR.aliases,
    patterns={
        r"\.hc_(attn|ffn)_(fn|base|scale)$": r".\1_hc.\2",
        r"\.index_kpool_compress_gate$": ".compress_gate.weight",
    },
    ignorable=("model.visual.*",),
)
_LING = WeightTable(
    _KIMI_LINEAR.packed
    | {
        "in_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj"),
        "q_kv_proj": ("q_proj", "kv_a_proj_with_mqa", "g_proj"),
    },
    renames={"model.word_embeddings.": "model.embed_tokens."},
    modules={"out_proj": "o_proj"},
    aliases={
        "attention": "self_attn",
        "dense": "o_proj",
        "shared_experts": "shared_expert",
        "o_norm": "norm",
        "expert_bias": "e_score_correction_bias",
    },
)
_MINIMAX = WeightTable(
    _ATTENTION | _ROUTER | {"in_proj": ("qkv_proj", "output_gate")},
    modules={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    # Buffers, which follow from the geometry.
    ignorable=("*.slope_rate", "*.query_decay", "*.key_decay", "*.diagonal_decay", "*.rotary_emb.inv_freq"),
)
_JAMBA = WeightTable(
    _PLAIN | {"router": ("router",), "part_norms": ("dt_layernorm", "b_layernorm", "c_layernorm")},
    modules={"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward", "norm": "final_layernorm"},
)
_BAMBA = WeightTable(
    _PLAIN,
    modules={
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
        "norm": "final_layernorm",
        "gated_norm": "norm",
    },
)
_MAMBA = {"embed_tokens": "embeddings", "input_layernorm": "norm", "mamba": "mixer", "gated_norm": "norm",
          "norm": "norm_f"}  # fmt: skip
_MAMBA2 = WeightTable(
    {}, renames={"backbone.embedding.": "model.embeddings.", "backbone.": "model."}, modules=_MAMBA
)  # early files say ``embedding``
_NEMOTRON_H = WeightTable(  # whatever a layer has is its ``mixer``, and it has one norm
    _ATTENTION | _ROUTER,
    renames={"backbone.": "model."},
    modules=_MAMBA
    | {
        "post_attention_layernorm": "norm",
        "self_attn": "mixer",
        "mlp": "mixer",
        "shared_expert": "shared_experts",
        "latent_in": "fc1_latent_proj",
        "latent_out": "fc2_latent_proj",
    },
    ignorable=("mtp.*",),
)
_GRANITE = WeightTable(
    _ATTENTION | {"router": ("router.layer",)},
    modules={"gated_norm": "norm", "mlp": "block_sparse_moe", "down_proj": "output_linear"},
    fused={"gate_up_proj": "input_linear"},
    patterns={  # the shared MLP stands beside the experts in files
        r"\.shared_mlp\.": ".block_sparse_moe.shared_expert.",
        r"\.block_sparse_moe\.input_linear\.weight$": ".block_sparse_moe.experts.gate_up_proj",
        r"\.block_sparse_moe\.output_linear\.weight$": ".block_sparse_moe.experts.down_proj",
    },
)
_ZAMBA = WeightTable(
    _PLAIN,
    modules={"norm": "final_layernorm"},
    patterns={  # a layer with a block holds another with Mamba
        r"\.mamba_decoder\.": ".",
        r"\.linear\.": ".shared_block.linear.",
        r"\.shared_transf\.self_attn\.": ".shared_block.",
        r"\.shared_transf\.feed_forward\.": ".shared_block.mlp.",
        r"\.shared_transf\.": ".shared_block.",
    },
)
_ZAMBA2 = WeightTable(
    _ATTENTION | {"qkv_down": ("linear_q_adapter.0", "linear_k_adapter.0", "linear_v_adapter.0")},
    modules={
        "norm": "final_layernorm",
        "gated_norm": "norm",
        "q_up": "linear_q_adapter.1",
        "k_up": "linear_k_adapter.1",
        "v_up": "linear_v_adapter.1",
        "gate_up_down": "gate_up_proj_adapter.0",
    },
    fused={"gate_up_proj": "gate_up_proj", "gate_up_up": "gate_up_proj_adapter.1"},
    patterns={  # a layer with a block holds another with Mamba; a block's adapters are listed by layer
        r"\.mamba_decoder\.": ".",
        r"\.linear\.": ".shared_block.linear.",
        r"\.shared_transformer\.": ".shared_block.",
        r"\.self_attn\.linear_([qkv])_adapter_list\.(\d+)\.": r".qkv_adapters.\2.linear_\1_adapter.",
        r"\.feed_forward\.gate_up_proj_adapter_list\.(\d+)\.": r".mlp_adapters.\1.gate_up_proj_adapter.",
        r"\.shared_block\.self_attn\.": ".shared_block.",
        r"\.shared_block\.feed_forward\.": ".shared_block.mlp.",
    },
)
_CCA = "qkv_proj"
"""The module of a ZAYA1 layer with projections and convolutions."""

_ZAYA = WeightTable(
    {
        "qkv_proj": tuple(f"{_CCA}.{part}" for part in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")),
        "router.down_proj": ("down_proj",),
        "fc1": ("router_mlp.fc1",),
        "fc2": ("router_mlp.fc2",),
        "out_proj": ("router_mlp.out_proj",),
    },
    modules={"conv_qk": _CCA, "router": "gate", "router_norm": "router_mlp.norm", "carry": "mlp.gate"},
    patterns={r"^model\.input_hidden_states_": "model.input_scale."},
)
_DENSE_GRANITE = replace(_GRANITE, modules=_GRANITE.modules | {"mlp": "shared_mlp"}, patterns={})

WEIGHT_TABLES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen2MoeForCausalLM": WeightTable(_PLAIN | _GATED_ROUTER),
    "Qwen3ForCausalLM": WeightTable(_PLAIN),
    "Qwen3MoeForCausalLM": WeightTable(_PLAIN | _ROUTER),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm3ForCausalLM": _LFM3,
    "InklingForCausalLM": _INKLING,
    "Inkling2ForCausalLM": _INKLING2,
    "OlmoHybridForCausalLM": _OLMO_HYBRID,
    "Gemma3ForCausalLM": WeightTable(_PLAIN),
    "RecurrentGemmaForCausalLM": _RECURRENT_GEMMA,
    "GptOssForCausalLM": WeightTable(_ATTENTION | {"router": ("router",)}),
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "BailingHybridForCausalLM": _LING,
    "Glm5NextForConditionalGeneration": _GLM5_NEXT,
    "Qwen3NextForCausalLM": WeightTable(
        _PLAIN | _GATED_ROUTER | {"in_proj": ("in_proj_qkvz", "in_proj_ba")}, ignorable=("mtp.*",)
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen4ExpForCausalLM": _QWEN4_EXP,
    "Qwen4ExpForConditionalGeneration": _QWEN4_EXP,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(_QWEN3_VL, packed=_PLAIN | _ROUTER),
    "BambaForCausalLM": _BAMBA,
    "GraniteMoeHybridForCausalLM": _GRANITE,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "FalconH1ForCausalLM": _BAMBA,
    "JambaForCausalLM": _JAMBA,
    "FalconMambaForCausalLM": _MAMBA2,
    "MambaForCausalLM": _MAMBA2,
    "MiniMaxForCausalLM": _MINIMAX,
    "Mamba2ForCausalLM": _MAMBA2,
    "ZambaForCausalLM": _ZAMBA,
    "Zamba2ForCausalLM": _ZAMBA2,
    "ZayaForCausalLM": _ZAYA,
}
"""By the architectures of ``config/families.py``."""


def weight_table(config: ModelConfig) -> WeightTable:
    """The table of a model. In Granite without experts the shared MLP is the MLP."""
    is_dense_granite = config.architecture == "GraniteMoeHybridForCausalLM" and config.moe is None
    table = _DENSE_GRANITE if is_dense_granite else WEIGHT_TABLES[config.architecture]
    if table in (_LING, _GLM5_NEXT):
        table = _with_head_after_layers(table, config)
    if table is _INKLING:
        table = replace(table, ignorable=_layers_that_do_not_run(config))
    if config.wrapper is None:
        return table
    wrapper = WRAPPERS[config.wrapper]
    patterns, ignorable = table.patterns | wrapper.patterns, (*table.ignorable, *wrapper.others)
    return replace(table, renames=wrapper.renames, patterns=patterns, ignorable=ignorable)


def _layers_that_do_not_run(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the tensors in a chained multi-token-prediction head, or of the layers beyond the drafts."""
    if not config.runs_mtp:
        return ("model.mtp.*",)
    return tuple(f"model.mtp.layers.{index}.*" for index in range(config.mtp_depth, config.mtp_layers))


def _with_head_after_layers(table: WeightTable, config: ModelConfig) -> WeightTable:
    """The table of a checkpoint that stores its multi-token-prediction head as one more layer (DeepSeek-V3's names)."""
    inside = "language_model." if "model.language_model." in table.renames else ""
    layer = f"model.{inside}layers.{config.num_hidden_layers}."
    if not config.runs_mtp:
        return replace(table, ignorable=(*table.ignorable, f"{layer}*"))
    parts = {
        "eh_proj.": "fc.",
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "shared_head.norm.": "norm.",
        "": "layers.0.",
    }
    copies = (f"{layer}embed_tokens.*", f"{layer}word_embeddings.*", f"{layer}shared_head.head.*")
    renames = {f"{layer}{own}": f"mtp.{part}" for own, part in parts.items()} | table.renames
    return replace(table, renames=renames, ignorable=(*table.ignorable, *copies))
