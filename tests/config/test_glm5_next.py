"""config.json of GLM-5.3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.published import read, tiny
from weft.cache.spec import CacheSpec
from weft.config.glm5_next import SHARED
from weft.config.indexed_attention import IndexedLatentConfig
from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig
from weft.config.layer_spec import CacheDtypes
from weft.config.moe import ClampedSwiGLU, SigmoidRouting
from weft.config.residual_streams import StreamsConfig
from weft.errors import ConfigError, UnsupportedModelError

ARCH = "Glm5NextForConditionalGeneration"


def indexed(config: Any, kind: str = "indexed_attention") -> IndexedLatentConfig:
    found = config.mixers[kind]["self_attn"]
    assert isinstance(found, IndexedLatentConfig)
    return found


def test_empty_and_as_transformers_writes_it(tmp_path: Path) -> None:
    import transformers

    config = read(tmp_path, {"architectures": [ARCH], "text_config": {}})
    reference: Any = transformers.Glm5NextConfig()
    text = reference.text_config
    assert list(config.layer_types) == text.layer_types
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, key) == getattr(text, key), key
    delta = KimiDeltaConfig(64, 128, 4, -5.0, flat_decay=True)
    assert config.mixers["linear_attention"]["self_attn"] == delta
    assert indexed(config).latent == LatentAttentionConfig(64, 256, 0, 256, 512, 1536, norm_eps=1e-5)
    indexer = indexed(config).indexer
    assert (indexer.num_heads, indexer.dim, indexer.pool, indexer.count, indexer.entry) == (32, 128, 16, 128, 256)
    assert config.streams == StreamsConfig("sinkhorn", 4, iterations=20, eps=1e-6)
    assert config.multipliers.swiglu_limit == 10.0
    moe = config.moe
    assert moe is not None and moe.sigmoid == SigmoidRouting(True, 1, 1, 2.5)
    assert moe.clamped == ClampedSwiGLU(1.0, 10.0, up_offset=0.0)
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (288, 8, 2048)
    assert moe.sparse_layers == frozenset(range(3, 45))
    written = json.loads(reference.to_json_string())
    again = read(tmp_path, written | {"architectures": [ARCH]})
    assert again.vision is not None and replace(again, vision=None) == config


@pytest.mark.parametrize("name", ["deepseek_sparse_attention", "full_attention", "indexed_attention"])
def test_names_of_the_layer_type(name: str, tmp_path: Path) -> None:
    types = ["linear_attention", name]
    changes = {"layer_types": types, "num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2, "indexer_types": None}
    settings = tiny(ARCH)
    settings["text_config"] |= changes
    assert read(tmp_path, settings).layer_types == ("linear_attention", "indexed_attention")


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"indexer_types": ["full", "full", "full", "shared"]}, [3]),
        ({"indexer_types": None, "index_topk_pattern": "FFSF"}, []),  # of a layer that has no indexer anyway
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1}, [1, 3]),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 2}, []),
    ],
)
def test_shared_layers(changes: dict[str, Any], shared: list[int], tmp_path: Path) -> None:
    """Shared layers must be those of transformers, in a model with three layers of indexed attention."""
    import transformers

    types = ["indexed_attention", "indexed_attention", "linear_attention", "indexed_attention"]
    settings = tiny(ARCH)
    settings["text_config"] |= {"layer_types": types} | changes
    config = read(tmp_path, settings)
    assert [i for i, kind in enumerate(config.layer_types) if kind == SHARED] == shared
    modes = transformers.Glm5NextConfig(text_config=settings["text_config"]).text_config.indexer_types
    expected = [mode == "shared" and kind == "indexed_attention" for mode, kind in zip(modes, types, strict=True)]
    assert [kind == SHARED for kind in config.layer_types] == expected


@pytest.mark.parametrize(
    ("nested", "floor"),
    [({}, -5.0), ({"gate_lower_bound": -2.0}, -2.0), ({"safe_gate": False}, -3.0)],
)
def test_published_names_of_linear_attention(nested: dict[str, Any], floor: float, tmp_path: Path) -> None:
    settings = tiny(ARCH)
    linear = {"num_heads": 4, "head_dim": 12, "short_conv_kernel_size": 3} | nested
    lower = {} if "safe_gate" in nested else {"linear_lower_bound": None}
    settings["text_config"] |= {"linear_attn_config": linear} | lower
    found = read(tmp_path, settings).mixers["linear_attention"]["self_attn"]
    assert found == KimiDeltaConfig(4, 12, 3, floor, flat_decay=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim=4 is not supported"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail=False is not supported"),
        ({"index_topk": 42}, "index_topk=42 is not valid; expected a multiple of index_kpool=4"),
        ({"index_kpool": 5, "index_topk": 40}, "index_kpool=5 is not supported; it must divide index_head_dim=16"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 is not valid"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound=1.0 is not valid"),
        ({"indexer_types": ["full"]}, "'full' or 'shared' for each of 4 layers"),
        ({"indexer_types": ["full"] * 3 + ["shared"]}, "it has no earlier indexer"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types holds 'sliding_attention'"),
    ],
)
def test_what_glm_does_not_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = tiny(ARCH)
    settings["text_config"] |= changes
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        read(tmp_path, settings)


def test_pages_that_would_cut_a_pool_are_refused(tmp_path: Path) -> None:
    config = read(tmp_path, tiny(ARCH))
    with pytest.raises(ConfigError, match=r"page_size=6 does not fit model\.layers\.3\.self_attn; give a mul"):
        CacheSpec.from_model(config, page_size=6, dtypes=CacheDtypes())
