"""Architectures that wrap a text model which Weft has under another name.

Job: say which text model a checkpoint's ``text_config`` describes, and how its tensors are named. Weft runs the text
model, and a tower that the text model's family reads (``Family.vision``). The tensors of other towers and of projectors
are not loaded. Does not know: keys of a text model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.config.json_object import JsonObject
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A class of checkpoints that hold a text model.

    Attributes:
        texts: supported ``model_type`` of the text config -> architecture of the text model. The first one is assumed
            if the text config names none.
        others: patterns of tensor names outside the text model.
        keys: names of the text config in ``config.json``, in order of precedence.
        tied: whether embeddings are tied if the file does not say. A key of the text config has no effect.
        renames: leading part of the text model's tensor names in the checkpoint -> leading part of Weft's names.
        patterns: see ``WeightTable.patterns``.
        assumed: ``quantization_config`` of files that have none and do not name the transformers that wrote them.
    """

    texts: Mapping[str, str]
    others: tuple[str, ...]
    keys: tuple[str, ...] = ("text_config",)
    tied: bool = False
    renames: dict[str, str] = field(default_factory=lambda: {"model.language_model.": "model."})
    patterns: dict[str, str] = field(default_factory=dict)
    assumed: Mapping[str, Any] | None = None

    def unwrap(self, top: JsonObject, name: str) -> tuple[JsonObject, JsonObject, str]:
        """Return the whole config with its defaults, the text config, and the text model's architecture.

        Raises:
            ConfigError: the file has no text config.
            UnsupportedModelError: Weft does not run this text model.
        """
        text = next((found for key in self.keys if (found := top.object(key)) is not None), None)
        if text is None:
            raise ConfigError(f"{top.where}: {name} needs a {self.keys[0]} object, which is missing")
        model_type = text.text("model_type", next(iter(self.texts)))
        if model_type not in self.texts:
            raise text.unsupported("model_type", f" in {name}; supported are {', '.join(self.texts)}")
        more: dict[str, Any] = {}
        if self.assumed is not None and not top.given("quantization_config") and not top.given("transformers_version"):
            more["quantization_config"] = self.assumed
        more["tie_word_embeddings"] = top.boolean("tie_word_embeddings", top.boolean("tie_embedding", self.tied))
        return JsonObject(top.values | more, top.where), text, self.texts[model_type]


_QWEN3_5 = Wrapper(
    {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    others=("model.vision_tower.*", "model.merger.*"),
)

WRAPPERS: dict[str, Wrapper] = {
    # MiniCPM-V 4.6 and 4.7, MiniCPM-OCR: Qwen3.5 behind a SigLIP tower.
    "MiniCPMV4_6ForConditionalGeneration": _QWEN3_5,
    "MiniCPMV4_7ForConditionalGeneration": _QWEN3_5,
    "MiniCPMOcrForConditionalGeneration": replace(_QWEN3_5, tied=True),
    # LFM2-VL: LFM2 behind a SigLIP 2 tower.
    "Lfm2VlForConditionalGeneration": Wrapper(
        {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"},
        others=("model.vision_tower.*", "model.multi_modal_projector.*"),
        tied=True,
    ),
    # LFM3-VL: LFM3 behind a tower of convolutions and attention.
    "Lfm3VlForConditionalGeneration": Wrapper(
        {"lfm3": "Lfm3ForCausalLM"}, others=("model.vision_tower.*", "model.multi_modal_projector.*"), tied=True
    ),
    # Inkling with its vision tower, behind an audio tower, in the names of published files.
    "InklingForConditionalGeneration": Wrapper(
        {"inkling_text": "InklingForCausalLM"},
        others=("model.visual.*", "model.vision_tower.*", "model.audio.*", "model.audio_tower.*"),
        renames={
            "model.mtp.": "mtp.",
            "model.llm.embed.": "model.embed_tokens.",
            "model.llm.unembed.": "lm_head.",
            "model.llm.": "model.",
            "model.language_model.": "model.",
        },
        patterns={
            r"\.attn\.": ".self_attn.",
            r"\.w([qkvr])_d[uv]\.": r".\1_proj.",
            r"\.wo_ud\.": ".o_proj.",
            r"\.attn_norm\.": ".input_layernorm.",
            r"\.mlp_norm\.": ".post_attention_layernorm.",
            r"_sconv\.weight$": "_sconv.conv1d.weight",
            r"\.gate\.bias$": ".gate.e_score_correction_bias",
            r"\.w13_dn\.": ".gate_up_proj.w13.",
            r"\.w2_md\.": ".down_proj.",
        },
    ),
    # Inkling 2 with its vision tower. The text model alone has the same names in files.
    "Inkling2ForConditionalGeneration": Wrapper(
        {"inkling2_text": "Inkling2ForCausalLM"},
        others=("model.visual.*",),
        renames={
            "model.llm.unembed.": "lm_head.",
            "model.llm.": "model.",
            "model.language_model.": "model.",
            "model.visual.backbone.": "model.visual.",
        },
        patterns={
            r"\.visual\.backbone\.embeddings\.patch_embedding\.": ".visual.patch_embed.proj.",
            r"\.visual\.backbone\.embeddings\.position_embedding$": ".visual.pos_embed.weight",
            r"(\.visual\.backbone\.layers\.\d+)\.self_attn\.out_proj\.": r"\1.attn.proj.",
            r"(\.visual\.backbone\.layers\.\d+)\.self_attn\.": r"\1.attn.",
        },
        assumed={  # published files have MXFP8 experts and do not say so
            "quant_method": "fp8",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": ["lm_head", "model.vision_tower", "model.language_model.layers.*.self_attn"],
        },
    ),
    # Nemotron-H Omni: Nemotron-H behind RADIO and Parakeet towers.
    "NemotronH_Omni_Reasoning_V3": Wrapper(
        {"nemotron_h": "NemotronHForCausalLM"},
        others=("vision_model.*", "mlp1.*", "sound_encoder.*", "sound_projection.*"),
        keys=("text_config", "llm_config"),
        renames={"language_model.backbone.": "model.", "language_model.": ""},
    ),
    # Nemotron 3.5 Transcribe: Nemotron-H behind a speech encoder, in NeMo's names.
    "Nemotron3_5TranscribeForConditionalGeneration": Wrapper(
        {"nemotron_h": "NemotronHForCausalLM"},
        others=("perception.*", "ctc_timestamp.*", "llm.mtp.*"),
        renames={"llm.model.embed_tokens.": "model.embeddings.", "llm.model.norm.": "model.norm_f.", "llm.": ""},
        patterns={
            r"\.mixer\._fp32_params\.": ".mixer.",
            r"\.experts\.gate_and_up_projs$": ".experts.gate_up_proj",
            r"\.experts\.down_projs$": ".experts.down_proj",
        },
    ),
}
"""By the class name in ``config.json``."""
