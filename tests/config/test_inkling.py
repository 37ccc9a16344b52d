"""Inkling's ``config.json``, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.published import read, tiny
from weft.config.attention import AttentionConfig
from weft.config.inkling import OutputConvConfig, RelativeAttentionConfig
from weft.config.layer_spec import CacheDtypes
from weft.config.moe import MoeConfig, SigmoidRouting
from weft.errors import ConfigError, UnsupportedModelError

INKLING = "InklingForCausalLM"


def test_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config, reference = read(tmp_path, {"architectures": [INKLING]}), transformers.InklingTextConfig()
    assert list(config.layer_types) == reference.layer_types and not config.tie_word_embeddings
    keys = "vocab_size hidden_size intermediate_size max_position_embeddings rms_norm_eps unpadded_vocab_size"
    for key in keys.split():
        assert getattr(config, key) == getattr(reference, key), key
    full = AttentionConfig(64, 8, 128, None, qk_norm=True, scale=1 / 128)
    assert config.mixers["hybrid"]["self_attn"] == RelativeAttentionConfig(full, None, 1024, 16, 4)
    own = AttentionConfig(64, 16, 128, None, qk_norm=True, scale=1 / 128)
    assert config.mixers["hybrid_sliding"]["self_attn"] == RelativeAttentionConfig(own, 512, 512, 16, 4)
    assert config.mixers["hybrid"]["mlp_sconv"] == OutputConvConfig(6144, 4)
    every_layer, routing = frozenset(range(66)), SigmoidRouting(True, scale=8.0)
    assert config.moe == MoeConfig(258, 8, 3072, True, None, every_layer, sigmoid=routing, num_always=2)
    assert config.multipliers.logits == 1 / 24 and config.multipliers.learned_mlp
    written = json.loads(reference.to_json_string(use_diff=False))
    assert read(tmp_path, written | {"architectures": [INKLING]}) == config


def test_names_of_published_files(tmp_path: Path) -> None:
    """The width of dense MLPs under a key of its own, indices in place of lists, and other names."""
    plain = tiny(INKLING, layer_types=None, mlp_layer_types=None, local_layer_ids=[0, 3], dense_mlp_idx=3)
    config = read(tmp_path, plain)
    assert config.layer_types == ("hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding")
    assert config.moe is not None and config.moe.sparse_layers == {3}
    names = {"sconv_kernel_size": "conv_kernel_size", "model_max_length": "max_position_embeddings"}
    other = {name: plain.pop(key) for name, key in names.items()}
    widths = {
        "dense_intermediate_size": plain["intermediate_size"],
        "intermediate_size": plain["moe_intermediate_size"],
    }
    assert read(tmp_path, {k: v for k, v in plain.items() if k != "moe_intermediate_size"} | other | widths) == config
    assert read(tmp_path, tiny(INKLING, mlp_layer_types=["dense"] * 4)).moe is None


def test_the_head_in_published_files_and_in_those_of_transformers(tmp_path: Path) -> None:
    own = {"num_nextn_predict_layers": 3, "chain_hidden_post_norm": False, "local_layer_ids": [0, 2]}
    published = read(tmp_path, tiny(INKLING, mtp_config=own))
    assert published.mtp_chain == ("hybrid_sliding", "hybrid", "hybrid_sliding") and published.mtp_layers == 3
    assert read(tmp_path, tiny(INKLING, num_mtp_layers=3, mtp_local_layer_ids=[0, 2])) == published
    assert read(tmp_path, tiny(INKLING, num_mtp_layers=2)).mtp_chain == ("hybrid", "hybrid")
    dtypes = CacheDtypes("bfloat16", "bfloat16", "float32")
    specs = {name: spec for name, spec in published.with_mtp(2).layer_specs(dtypes).items() if name.startswith("mtp.")}
    modules = [f"{i}.transformer_block.{name}" for i in range(2) for name in ("self_attn", "attn_sconv", "mlp_sconv")]
    assert list(specs) == [f"mtp.layers.{name}" for name in (*modules, "1.delay")]
    assert specs["mtp.layers.1.delay"].slot_bytes == 48 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_config": {"num_nextn_predict_layers": 1, "rel_extent": 9}}, "mtp_config has the key 'rel_extent'"),
        ({"num_mtp_layers": 1, "chain_hidden_post_norm": True}, "chain_hidden_post_norm is not False"),
        ({"num_mtp_layers": 1, "mtp_hidden_states_first": False}, "mtp_hidden_states_first is not True"),
        ({"num_mtp_layers": 2, "layer_types": ["hybrid_sliding"] * 4}, "no layer of the model has .* 'hybrid'"),
        ({"num_mtp_layers": None}, "has no layers of such a head"),
    ],
)
def test_heads_that_do_not_run(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The model does, without drafts of the head."""
    config = read(tmp_path, tiny(INKLING, **changes))
    with pytest.raises(ConfigError, match=rf"{message}.*'ngram'"):
        config.with_mtp(1)


def test_what_a_layer_keeps(tmp_path: Path) -> None:
    """Pages and convolutions, or a window and convolutions; two ranks have half of all but what is after the sum."""
    config, dtypes = read(tmp_path, tiny(INKLING)), CacheDtypes("bfloat16", "bfloat16", "float32")
    full, window, conv = (
        config.mixers[kind][name].layer_spec(48, dtypes).on_rank(2)
        for kind, name in (("hybrid", "self_attn"), ("hybrid_sliding", "self_attn"), ("hybrid", "attn_sconv"))
    )
    assert (full.token_bytes, full.slot_bytes) == (2 * 1 * 16 * 2, 2 * 1 * 16 * 3 * 2)
    assert (window.token_bytes, window.slot_bytes) == (0, 2 * 20 * 2 * 12 * 2 + 2 * 2 * 12 * 3 * 2)
    assert conv.slot_bytes == 48 * 3 * 2
    wide = read(tmp_path, tiny(INKLING, sliding_window_size=512)).mixers["hybrid_sliding"]["self_attn"]
    assert isinstance(wide, RelativeAttentionConfig) and (wide.window, wide.extent) == (None, 512)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shared_expert_sink": False}, UnsupportedModelError, "shared_expert_sink=False is not supported"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu' is not supported"),
        ({"n_shared_experts": 0}, ConfigError, "n_shared_experts=0 is not valid; expected an integer of at least 1"),
        ({"conv_kernel_size": 1}, ConfigError, "conv_kernel_size=1 is not valid"),
        ({"sliding_window_size": 0}, ConfigError, "sliding_window_size=0 is not valid; expected an integer"),
        ({"swa_num_key_value_heads": 3}, ConfigError, r"\(swa_\*\): num_attention_heads=4 is not divisible by num_key"),
        ({"num_experts_per_tok": 7}, ConfigError, "num_experts_per_tok=7 is greater than num_experts=6"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedModelError, "supported are hybrid, hybrid_sliding"),
        ({"mlp_layer_types": ["dense"]}, ConfigError, "'dense' or 'sparse' for each of 4 layers"),
        ({"unpadded_vocab_size": 300}, ConfigError, "unpadded_vocab_size=300 is not valid; expected"),
        ({"log_scaling_n_floor": 0}, ConfigError, "log_scaling_n_floor=0 is not valid"),
        ({"num_mtp_layers": 2, "mtp_local_layer_ids": [2]}, ConfigError, "numbers below num_mtp_layers=2"),
    ],
)
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, tiny(INKLING, **changes))
