"""config.json of Qwen4-Exp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.published import read, tiny
from weft.config.attention import AttentionConfig
from weft.config.gated_delta_net import GatedDeltaNetConfig, InProjLayout
from weft.config.indexed_attention import IndexedAttentionConfig, IndexerConfig
from weft.config.moe import MoeConfig
from weft.config.ngram import NGramConfig
from weft.config.qwen4_exp import WITH_NGRAMS
from weft.config.residual_streams import StreamsConfig
from weft.config.rope import RopeConfig
from weft.errors import ConfigError, UnsupportedModelError

TEXT, WHOLE = "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"
INDEXER = {f"indexer_{key}": value for key, value in
           {"n_heads": 1, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 4}.items()}  # fmt: skip


def test_defaults_and_as_transformers_writes_it(tmp_path: Path) -> None:
    """An indexer has no default."""
    import transformers

    given = INDEXER | {"ple_layer_ids": [2], "eos_token_id": 9}
    config, reference = read(tmp_path, {"architectures": [TEXT], **given}), transformers.Qwen4ExpTextConfig(**given)
    for key in ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings", "num_hidden_layers"):
        assert getattr(config, key) == getattr(reference, key), key
    assert config.layer_types[1] == WITH_NGRAMS
    assert [kind.removeprefix("ngram_") for kind in config.layer_types] == reference.layer_types
    delta = GatedDeltaNetConfig(16, 32, 128, 128, 4, in_proj=InProjLayout.SEPARATE)
    assert config.mixers["linear_attention"]["linear_attn"] == delta == config.mixers[WITH_NGRAMS]["linear_attn"]
    attention = AttentionConfig(16, 2, 256, RopeConfig(10000.0, 256), qk_norm=True, output_gate=True)
    indexed = IndexedAttentionConfig(attention, IndexerConfig(1, 256, 4, 512, 256, 2048 * 512))
    assert config.mixers["indexed_attention"]["self_attn"] == indexed
    ngrams = NGramConfig((1,), 3, 8, 2048, 2048, 4, 4, 248320, 9, 20_000_000, 128, 512, 1234)
    assert config.mixers[WITH_NGRAMS]["ple"] == ngrams
    assert config.streams == StreamsConfig("gated", 4, rank=320)
    assert config.moe == MoeConfig(512, 10, 512, True, 512, frozenset(range(40)))
    written = json.loads(reference.to_json_string())
    assert read(tmp_path, written | {"architectures": [TEXT]}) == config


def test_the_published_checkpoint_is_read(tmp_path: Path) -> None:
    """The keys of Qwen3.8-Flash-Next that differ from the defaults."""
    text = tiny(TEXT) | {
        "hidden_size": 2560, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "indexer_n_heads": 4, "indexer_head_dim": 128, "indexer_budget": 2048, "ple_embed_dim": 2560, "ngram_size": 3,
        "heads_per_ngram": 8, "hc_count": 4, "hc_lowrank": 320, "output_gate_type": "sigmoid", "num_hidden_layers": 48,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        "ple_layer_ids": [2], "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    config = read(tmp_path, text)
    delta = GatedDeltaNetConfig(16, 48, 128, 128, 4, sigmoid_gate=True, in_proj=InProjLayout.SEPARATE)
    assert config.mixers["linear_attention"]["linear_attn"] == delta == config.mixers[WITH_NGRAMS]["linear_attn"]
    assert config.layer_types.count("indexed_attention") == 12 and config.mtp_layers == 1


@pytest.mark.parametrize(("gate", "sigmoid"), [("silu", False), ("swish", False), ("sigmoid", True)])
def test_output_gate(gate: str, sigmoid: bool, tmp_path: Path) -> None:
    config = read(tmp_path, tiny(TEXT, output_gate_type=gate))
    assert config.mixers["linear_attention"]["linear_attn"].sigmoid_gate == sigmoid


def test_hashes_are_those_of_transformers() -> None:
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    from tests.tiny import make_config

    config = make_config(TEXT, ple_layer_ids=[1, 2], vocab_size=151)
    geometry = NGramConfig((0, 1), 3, 2, 24, 48, 3, 3, 151, 5, 50, 8, 3, 77)
    for place in range(2):
        reference = Qwen4ExpTextNGramEmbedding(config, 24, place, place)
        assert geometry.table_sizes(place) == reference.head_vocab_sizes
        assert geometry.multipliers(place) == reference.layer_multipliers.tolist()


@pytest.mark.parametrize("name", ["qwen_sparse_attention", "full_attention", "indexed_attention"])
@pytest.mark.parametrize("arch", [TEXT, WHOLE])
def test_names_of_the_layer_type(arch: str, name: str, tmp_path: Path) -> None:
    settings = tiny(arch)
    text = settings["text_config"] if arch == WHOLE else settings
    text |= {"layer_types": [name, "linear_attention"], "num_hidden_layers": 2, "ple_layer_ids": [2]}
    assert read(tmp_path, settings).layer_types == ("indexed_attention", WITH_NGRAMS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": "tanh"}, "output_gate_type='tanh' is not supported"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads=2 is not supported"),
        ({"indexer_budget": 42}, "indexer_budget=42 is not valid; expected a multiple of indexer_compress_ratio=4"),
        ({"indexer_compress_ratio": 5}, "it must divide indexer_head_dim=72"),
        ({"indexer_head_dim": 4}, "wider than indexer_head_dim=4"),
        ({"indexer_n_heads": None}, "required key 'indexer_n_heads' is missing"),
        ({"ple_layer_ids": [3]}, "layers of linear_attention, counted from 1"),
        ({"ple_layer_ids": [5]}, "layers of linear_attention, counted from 1"),
        ({"ple_embed_dim": 25}, "a multiple of the 4 n-gram heads"),
        ({"eos_token_id": None}, "an id, at which n-grams begin anew"),
        ({"hc_count": 1}, "hc_count=1 is not valid"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
    ],
)
def test_what_qwen4_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, tiny(TEXT, **changes))
