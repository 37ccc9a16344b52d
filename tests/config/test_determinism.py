"""Deterministic inference: settings that turn the mode on, settings that the mode chooses, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.media import VL, overrides
from tests.tiny import make_checkpoint
from weft.cli import main
from weft.config import determinism, resolution, resolve
from weft.config.attention import AttentionConfig
from weft.config.determinism import VLLM_VARIABLE
from weft.errors import ConfigError
from weft.runner.model_runner import _check_order_of_sums

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SIXTEEN = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 16}}
RATE = {"synthetic_acceptance_rate": 0.5}


def settings(folder: Path, **more: Any) -> Any:
    return resolve(model=str(folder), skip_tokenizer_init=True, device="cpu", **more)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("tiny"))


def test_off_unless_asked_for(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings(hybrid).deterministic
    monkeypatch.setenv(VLLM_VARIABLE, "1")
    config = settings(hybrid)
    assert config.deterministic and config.reasons["deterministic"].startswith("VLLM_BATCH_INVARIANT=1: the same bits")
    assert not settings(hybrid, deterministic=False).deterministic
    monkeypatch.setenv(VLLM_VARIABLE, "0")
    assert not settings(hybrid).deterministic


def test_states_stay_in_float32(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path, mamba_ssm_dtype="bfloat16")
    assert settings(folder).mamba_ssm_dtype == "bfloat16"
    config = settings(folder, deterministic=True)
    assert config.mamba_ssm_dtype == "float32" and "round" in config.reasons["mamba_ssm_dtype"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"max_num_batched_tokens": 99, "max_num_seqs": 36}, "max_num_batched_tokens=99.*give 100 or more"),
        ({"speculative_config": NGRAM | RATE, "load_format": "dummy"}, "synthetic_acceptance_rate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'.*use float32"),
        ({"quantization": "int4"}, "int4 weights: their kernels follow"),
        ({"enable_torch_compile": True, "cuda_graph_mode": "FULL"}, "enable_torch_compile"),
        (
            {"enable_piecewise_cuda_graph": True, "piecewise_cuda_graph_compiler": "eager"},
            "piecewise_cuda_graph_compiler='eager'.*use capture",
        ),
    ],
)
def test_what_cannot_be_promised_is_refused(hybrid: Path, more: dict[str, Any], problem: str) -> None:
    settings(hybrid, **more)
    with pytest.raises(ConfigError, match=f"(?s)deterministic=True is not possible with .*{problem}"):
        settings(hybrid, deterministic=True, **more)


def test_layers_without_a_fixed_order_are_refused(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_MIXERS", (AttentionConfig,))
    with pytest.raises(ConfigError, match=r"layers of Qwen3NextForCausalLM \(GatedDeltaNet\): there is no kernel"):
        settings(hybrid, deterministic=True)


def test_images_are_encoded_without_graphs(tmp_path: Path) -> None:
    folder = make_checkpoint(VL, tmp_path, **overrides(VL))
    config = settings(folder, deterministic=True, cuda_graph_mode="FULL")
    assert config.encoder_cuda_graph_patches == () and "alone" in config.reasons["encoder_cuda_graph_patches"]
    with pytest.raises(ConfigError, match="encoder_cuda_graph_patches: padding changes"):
        settings(folder, deterministic=True, cuda_graph_mode="FULL", encoder_cuda_graph_patches=[64])


def test_drafts_never_run_as_prefills(hybrid: Path, tmp_path: Path) -> None:
    """Neither in pieces, nor in layers without an operation that verifies."""
    mamba2 = make_checkpoint("BambaForCausalLM", tmp_path)
    for folder, mode in ((hybrid, "PIECEWISE"), (mamba2, "FULL")):
        given: dict[str, Any] = {"speculative_config": NGRAM, "cuda_graph_mode": mode}
        assert not settings(folder, **given).verifies
        assert settings(folder, **given, deterministic=True).verifies


def test_names_of_other_engines(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["config", "--model", str(hybrid), "--skip-tokenizer-init", "--enable-deterministic-inference"]
    assert main(flags) == 0
    assert "slower products" in capsys.readouterr().out, "weft config says what the mode costs"
    with pytest.raises(ConfigError, match="deterministic"):
        settings(hybrid, enable_deterministic_inference=True)


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sums was measured on Hopper."""
    _check_order_of_sums(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _check_order_of_sums(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 9.0 \(H100, H200\); this one has 8.0"):
        _check_order_of_sums(torch.device("cuda"))


@pytest.mark.parametrize(
    ("arch", "more", "problem"),
    [
        ("Qwen3ForCausalLM", {"dtype": "float16"}, "dtype='float16' on a GPU"),
        ("Qwen3ForCausalLM", SIXTEEN, "15 or fewer"), ("InklingForCausalLM", SIXTEEN, "15 or fewer"),
        ("ZayaForCausalLM", SIXTEEN, "15 or fewer"),
        ("Qwen3ForCausalLM", {"backend": "torch", "enforce_eager": True}, "backend='torch' on a GPU"),
    ],
)
def test_a_gpu_refuses_more(
    arch: str, more: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolution, "cuda_available", lambda: True)
    given = {"model": str(make_checkpoint(arch, tmp_path)), "skip_tokenizer_init": True, "dtype": "bfloat16"} | more
    resolve(**given, device="cpu", deterministic=True)
    with pytest.raises(ConfigError, match=problem):
        resolve(**given, device="cuda", deterministic=True)
