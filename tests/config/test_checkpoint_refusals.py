"""config.json files that are refused: unsupported values, inconsistent numbers, broken files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.published import QWEN3_NEXT, read, tiny, write
from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES
from weft.config.checkpoint import read_checkpoint_config
from weft.config.families import FAMILIES
from weft.config.family import Family
from weft.errors import ConfigError, UnsupportedModelError

EQUAL_FACTORS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        (
            "Qwen3ForCausalLM",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quant_method='bitsandbytes' is not supported; supported are fp8",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "'sliding_attention', which is not",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["linear_attention"] * 2},
            "'linear_attention', which is not supported for",
        ),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is 'silu'"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "'dynamic' is not supported; supported are",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {}}}, "separate rotary settings per layer type"),
        ("LlamaForCausalLM", {"rope_parameters": {"linear_attention": {}}}, "separate rotary settings per layer type"),
        ("LlamaForCausalLM", {"rope_parameters": EQUAL_FACTORS}, "high_freq_factor=4 must be greater than"),
        ("Qwen3NextForCausalLM", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "gives a rotary dimension of 24"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this"),
        ("Qwen3NextForCausalLM", {"head_dim": 12}, "gives a rotary dimension of 3; it must be even"),
        ("Qwen3NextForCausalLM", {"head_dim": 4}, "gives a rotary dimension of 1"),
        ("Qwen3NextForCausalLM", {"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        ("Qwen3NextForCausalLM", {"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype='float16' is not supported"),
        ("Qwen3_5MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
        (
            "Qwen3ForCausalLM",
            {"dtype": "float8_e4m3fn"},
            "dtype='float8_e4m3fn' is not supported; supported are float32",
        ),
    ],
)
def test_unsupported_values(arch: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, tiny(arch, **changes))


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds 'sliding_attention', but use_sliding_window is false",
        ),
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 3},
            "num_attention_heads=4 is not divisible by num_key_value_heads=3",
        ),
        (
            "LlamaForCausalLM",
            {"head_dim": None, "hidden_size": 50},
            "hidden_size=50 is not divisible by num_attention_heads=4",
        ),
        ("LlamaForCausalLM", {"hidden_size": 0}, "hidden_size=0 is not valid; expected an integer of at least 1"),
        ("LlamaForCausalLM", {"hidden_size": "big"}, "hidden_size='big' is not valid"),
        ("LlamaForCausalLM", {"vocab_size": True}, "vocab_size=True is not valid"),
        ("LlamaForCausalLM", {"rms_norm_eps": -1}, "rms_norm_eps=-1 is not valid; expected a number above 0"),
        ("LlamaForCausalLM", {"rope_theta": 0, "rope_parameters": None}, "rope_theta=0 is not valid"),
        ("LlamaForCausalLM", {"rope_scaling": [1]}, r"rope_scaling=\[1\] is not valid; expected an object"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "linear"}},
            r"\(rope_scaling\): required key 'factor' is missing",
        ),
        (
            "LlamaForCausalLM",
            {"tie_word_embeddings": "no"},
            "tie_word_embeddings='no' is not valid; expected true or false",
        ),
        ("LlamaForCausalLM", {"eos_token_id": -1}, "eos_token_id=-1 is not valid"),
        (
            "LlamaForCausalLM",
            {"layer_types": ["full_attention"] * 3},
            "layer_types has 3 entries but num_hidden_layers=2",
        ),
        ("LlamaForCausalLM", {"layer_types": "full_attention"}, "expected a list with one entry per layer"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is greater than num_experts=5"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [2]}, "expected layer indices below num_hidden_layers=2"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not divisible by"),
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 is not valid"),
        ("Qwen3_5ForConditionalGeneration", {"text_config": None}, "needs a text_config object, which is missing"),
        ("LlamaForCausalLM", {"architectures": []}, r"architectures=\[\] is not a list with one class name"),
        ("LlamaForCausalLM", {"architectures": None}, "architectures=None is not a list"),
    ],
)
def test_inconsistent_numbers(arch: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, tiny(arch, **changes))


def test_unknown_architectures_list_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, {"architectures": ["GPT2LMHeadModel"]})
    assert all(name in str(error.value) for name in ("GPT2LMHeadModel", *FAMILIES))
    assert {*ARCHITECTURES, *MAMBA_ARCHITECTURES} == set(FAMILIES)


BROKEN = [
    (b"", "is not valid JSON"),
    (b'{"architectures": ["Llama', "is not valid JSON .*truncated"),
    (b"[1, 2]", "holds a JSON list, not an object"),
    (b'"text"', "holds a JSON str, not an object"),
    (b"\xff\xfe\x00", "is not UTF-8 text"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_broken_config_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json {message}"):
        read_checkpoint_config(tmp_path)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        read_checkpoint_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        read_checkpoint_config(tmp_path)


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path, QWEN3_NEXT)
    code = (
        "import sys; from pathlib import Path; from weft.config.checkpoint import read_checkpoint_config; "
        f"read_checkpoint_config(Path({str(tmp_path)!r})); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["GELU", "SiLU", "swish", "relu"])
def test_a_family_names_an_activation_exactly(name: str) -> None:
    with pytest.raises(ValueError, match=f"activation='{name}' is not one of silu, gelu, gelu_pytorch_tanh, relu2"):
        Family(mixers={}, activation=name)
