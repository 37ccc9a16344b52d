"""Inkling 2's ``config.json``, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.published import read, tiny
from weft.config.attention import AttentionConfig
from weft.config.inkling import OutputConvConfig, RelativeAttentionConfig
from weft.config.inkling2 import ClippedAttentionConfig
from weft.config.layer_spec import CacheDtypes
from weft.config.moe import MoeConfig, SigmoidRouting, SoftcappedSwiGLU
from weft.config.residual_streams import StreamsConfig
from weft.errors import ConfigError, UnsupportedModelError

INKLING2 = "Inkling2ForCausalLM"


def test_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": [INKLING2]}), transformers.Inkling2TextConfig()
    assert list(config.layer_types) == reference.layer_types and not config.tie_word_embeddings
    keys = "vocab_size hidden_size max_position_embeddings rms_norm_eps unpadded_vocab_size"
    for key in keys.split():
        assert getattr(config, key) == getattr(reference, key), key
    heads = AttentionConfig(48, 8, 128, None)
    full = RelativeAttentionConfig(heads, None, 1024, 16, 4, 128000, 0.1)
    assert config.mixers["hybrid"]["self_attn"] == ClippedAttentionConfig(full, 512**0.5, 8.0, dynamic=True)
    window = RelativeAttentionConfig(heads, 1024, 1024, 16, 4)
    assert config.mixers["hybrid_sliding"]["self_attn"] == ClippedAttentionConfig(window, 512**0.5, 8.0, dynamic=False)
    assert config.mixers["hybrid"]["mlp_sconv"] == OutputConvConfig(4608, 4, 5**-0.5)
    every_layer, routing = frozenset(range(48)), SigmoidRouting(True, scale=8.0)
    activation = SoftcappedSwiGLU(4.0, 25.0)
    assert config.moe == MoeConfig(384, 8, 2304, True, None, every_layer, sigmoid=routing, softcapped=activation)
    assert config.streams == StreamsConfig("blocks", 6) and config.multipliers.logits_cap == 30.0
    assert config.intermediate_size == 0 and config.num_dense_mlps == 0
    written = json.loads(reference.to_json_string(use_diff=False))
    assert read(tmp_path, written | {"architectures": [INKLING2]}) == config


def test_other_names_of_keys(tmp_path: Path) -> None:
    plain = tiny(INKLING2)
    config = read(tmp_path, plain)
    names = {
        "sconv_kernel_size": "conv_kernel_size", "model_max_length": "max_position_embeddings",
        "routed_scaling_factor": "route_scale", "num_local_experts": "n_routed_experts",
    }  # fmt: skip
    other = {name: plain.pop(key) for name, key in names.items()}
    assert read(tmp_path, plain | other) == config


def test_what_a_layer_keeps(tmp_path: Path) -> None:
    """Dynamic convolutions keep inputs once for each delay. Two ranks have half of all that is before a sum."""
    config, dtypes = read(tmp_path, tiny(INKLING2)), CacheDtypes("bfloat16", "bfloat16", "float32")
    full, window, conv = (
        config.mixers[kind][name].layer_spec(48, dtypes).on_rank(2)
        for kind, name in (("hybrid", "self_attn"), ("hybrid_sliding", "self_attn"), ("hybrid", "attn_sconv"))
    )
    assert (full.token_bytes, full.slot_bytes) == (2 * 1 * 16 * 2, 3 * 2 * 1 * 16 * 3 * 2)
    assert (window.token_bytes, window.slot_bytes) == (0, 2 * 20 * 2 * 12 * 2 + 2 * 2 * 12 * 3 * 2)
    assert conv.slot_bytes == 48 * 3 * 2


@pytest.mark.parametrize(("kind", "index"), [("hybrid_sliding", 4), ("hybrid", 5)])
def test_weights_of_a_layer_are_counted(kind: str, index: int, tmp_path: Path) -> None:
    """Scales of clips are left out."""
    from transformers.models.inkling2 import modeling_inkling2 as reference

    spec = read(tmp_path, {"architectures": [INKLING2]}).mixers[kind]["self_attn"].layer_spec(4608, CacheDtypes())
    attention = reference.Inkling2FullAttention if kind == "hybrid" else reference.Inkling2SlidingAttention
    with torch.device("meta"):
        layer = attention(reference.Inkling2TextConfig(), index)
    scales = 48 * (128 + 16)
    assert spec.num_weights == sum(parameter.numel() for parameter in layer.parameters()) - scales


def test_the_form_of_published_experts(tmp_path: Path) -> None:
    """A file that transformers did not write has MXFP8 experts, and does not say so; transformers adds the same."""
    from transformers.models.inkling2.configuration_inkling2 import INKLING2_QUANTIZATION_CONFIG

    wrapped = {"architectures": ["Inkling2ForConditionalGeneration"], "text_config": tiny(INKLING2)}
    found = read(tmp_path, wrapped).quantization
    assert found == read(tmp_path, wrapped | {"quantization_config": INKLING2_QUANTIZATION_CONFIG}).quantization
    assert found is not None and found.name == "mxfp8"
    assert found.scheme(["model.layers.0.mlp.experts.5.down_proj"]) == found.main
    assert found.scheme(["model.language_model.layers.0.self_attn.wq_du"]) is None
    saved = read(tmp_path, wrapped | {"transformers_version": "5.23.0"})
    assert saved.wrapper == wrapped["architectures"][0] and saved.quantization is None
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    other = read(tmp_path, wrapped | {"quantization_config": blocks}).quantization
    assert other is not None and other.name == "fp8"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func='softmax' is not supported"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu' is not supported"),
        ({"conv_kernel_size": 1}, ConfigError, "conv_kernel_size=1 is not valid"),
        ({"n_layers_per_attn_res_block": 0}, ConfigError, "n_layers_per_attn_res_block=0 is not valid"),
        ({"qk_l2_clip_threshold": 0.0}, ConfigError, "qk_l2_clip_threshold=0.0 is not valid"),
        ({"mlp_up_softcap": -1.0}, ConfigError, "mlp_up_softcap=-1.0 is not valid"),
        ({"final_logit_softcapping": 0.0}, ConfigError, "final_logit_softcapping=0.0 is not valid"),
        ({"num_experts_per_tok": 7}, ConfigError, "num_experts_per_tok=7 is greater than num_experts=6"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedModelError, "supported are hybrid, hybrid_sliding"),
        ({"unpadded_vocab_size": 300}, ConfigError, "unpadded_vocab_size=300 is not valid; expected"),
    ],
)
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, tiny(INKLING2, **changes))
