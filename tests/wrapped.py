"""Tiny random checkpoints of architectures that wrap a text model, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import make_config

_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_MINICPM = {"vision_config": _SIGLIP, "insert_layer_id": 1}
_LFM2_VL = {"vision_config": _SIGLIP | {"model_type": "siglip2_vision_model"}, "projector_hidden_size": 16}
_RADIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
    "max_img_size": 64,
    "video_temporal_patch_size": 2,
}
_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TRANSCRIBE = {
    "audio_config": {
        "asr_config": _SMALL,
        "diarization_config": {
            "model_type": "nemotron3_diarization",
            "audio_config": {"num_hidden_layers": 1, "intermediate_size": 16},
        },
    },
    "word_timestamp_config": _SMALL | {"vocab_size": 20, "blank_token_id": 19},
}
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniCPMV4_6ForConditionalGeneration": ("MiniCPMV4_6Config", _MINICPM),
    "MiniCPMV4_7ForConditionalGeneration": ("MiniCPMV4_7Config", _MINICPM),
    "MiniCPMOcrForConditionalGeneration": ("MiniCPMOcrConfig", _MINICPM),
    "Lfm2VlForConditionalGeneration": ("Lfm2VlConfig", _LFM2_VL),
    "Lfm3VlForConditionalGeneration": (
        "Lfm3VlConfig",
        {
            "vision_config": _SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 2, "patch_size": 8},
            "projector_hidden_size": 16,
        },
    ),
    "InklingForConditionalGeneration": (
        "InklingConfig",
        {
            "vision_config": _SMALL | {"patch_size": 4, "num_hidden_layers": 2},
            "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        },
    ),
    "Inkling2ForConditionalGeneration": (
        "Inkling2Config",
        {
            "vision_config": _SMALL
            | {"patch_size": 4, "posemb_grid_size": 4, "projection_hidden_dim": 16, "text_hidden_size": 48},
        },
    ),
    "NemotronH_Omni_Reasoning_V3": (
        "NemotronH_Omni_Reasoning_V3_Config",
        {"vision_config": _RADIO, "projector_hidden_size": 16, "vision_hidden_size": 16},
    ),
    "Nemotron3_5TranscribeForConditionalGeneration": ("Nemotron3_5TranscribeConfig", _TRANSCRIBE),
}
WRAPPED_TEXTS = {
    "MiniCPMV4_6ForConditionalGeneration": ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "MiniCPMV4_7ForConditionalGeneration": ("Qwen3_5ForCausalLM",),
    "MiniCPMOcrForConditionalGeneration": ("Qwen3_5ForCausalLM",),
    "Lfm2VlForConditionalGeneration": ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    "Lfm3VlForConditionalGeneration": ("Lfm3ForCausalLM",),
    "InklingForConditionalGeneration": ("InklingForCausalLM",),
    "Inkling2ForConditionalGeneration": ("Inkling2ForCausalLM",),
    "NemotronH_Omni_Reasoning_V3": ("NemotronHForCausalLM",),
    "Nemotron3_5TranscribeForConditionalGeneration": ("NemotronHForCausalLM",),
}
"""Wrapper -> the text models with which it is tested."""


def make_wrapped(wrapper: str, text: str, folder: Path, **settings: Any) -> Any:
    """Save a random checkpoint of ``wrapper`` around the text model ``text``, and return transformers' model.

    ``settings`` are keys of the whole config.
    """
    name, own = _SETTINGS[wrapper]
    config = getattr(transformers, name)(text_config=make_config(text).to_dict(), **own, **settings)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, wrapper)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith(("global_scale", "l2_clip.scale", "_input.query", "static_weight")):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator))
    model.save_pretrained(folder)
    return model
