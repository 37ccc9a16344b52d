"""Every setting either changes something in every engine, or says so where it changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_checkpoint
from weft.config import resolve
from weft.config.fields import OPTIONS
from weft.errors import ConfigError

EVERYWHERE = frozenset(
    {
        "model", "served_model_name", "load_format", "skip_tokenizer_init", "dtype", "quantization", "max_model_len",
        "seed", "device", "backend", "tensor_parallel_size", "data_parallel_size", "data_parallel_backend", "page_size",
        "num_kv_pages", "max_num_seqs", "max_logprobs", "logprobs_mode", "max_num_batched_tokens",
        "enable_overlap",
        "speculative_config", "language_model_only", "enable_prefix_caching", "enforce_eager", "cuda_graph_mode",
        "deterministic", "graph_profile", "enable_piecewise_cuda_graph", "profile_dir", "enable_sleep_mode",
    }
)  # fmt: skip
"""Settings that mean something for every model, on every device and with all other settings."""

TEXT, IMAGES, ATTENTION = "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"

WARNED: dict[str, tuple[Any, str, dict[str, Any], str, dict[str, Any]]] = {
    # value; model and settings without an effect; model and settings with an effect
    "tokenizer": (None, TEXT, {"skip_tokenizer_init": True}, TEXT, {}),
    "disable_custom_all_reduce": (True, TEXT, {"device": "cuda"}, TEXT, {"device": "cuda", "tensor_parallel_size": 2}),
    "gpu_memory_utilization": (0.9, TEXT, {"device": "cpu"}, TEXT, {"device": "cuda"}),
    "cpu_cache_gib": (2, TEXT, {"device": "cuda"}, TEXT, {"device": "cpu"}),
    "num_state_slots": (9, ATTENTION, {}, TEXT, {}),
    "mamba_ssm_dtype": ("float32", ATTENTION, {}, TEXT, {}),
    "state_checkpoint_policy": ("aligned", ATTENTION, {}, TEXT, {}),
    "kv_offloading_policy": ("write_back", TEXT, {}, TEXT, {"kv_offloading_size": 1}),
    "limit_mm_per_prompt": ({"image": 2}, TEXT, {}, IMAGES, {}),
    "mm_processor_cache_gb": (2, TEXT, {}, IMAGES, {}),
    "allowed_local_media_path": ("/", TEXT, {}, IMAGES, {}),
    "allowed_media_domains": (["images.example"], TEXT, {}, IMAGES, {}),
}

REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "enable_expert_parallel": (True, {}),
    "distributed_executor_backend": ("mp", {}),
    "kv_cache_dtype": ("fp8", {"model": "Mamba2ForCausalLM"}),
    "schedule_policy": ("lpm", {"enable_prefix_caching": False}),
    "max_num_encoder_input_tokens": (64, {}),
    "encoder_cache_size": (64, {}),
    "encoder_cuda_graph_patches": ([64], {}),
    "eviction_policy": ("lru", {"enable_prefix_caching": False}),
    "kv_offloading_size": (1.0, {"enable_prefix_caching": False}),
    "kv_offloading_dir": ("/tmp", {}),
    "kv_offloading_disk_size": (1.0, {}),
    "kv_offloading_disk_hours": (1.0, {}),
    "cuda_graph_bs": ([1], {}),
    "cuda_graph_max_bs": (4, {}),
    "enable_cudagraph_gc": (True, {}),
    "piecewise_cuda_graph_tokens": ([64], {}),
    "piecewise_cuda_graph_max_tokens": (64, {}),
    "piecewise_cuda_graph_compiler": ("eager", {}),
    "splitting_ops": (["attention"], {}),
    "enable_torch_compile": (True, {}),
    "torch_compile_max_bs": (4, {}),
    "enable_torch_compile_debug_mode": (True, {}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of each model. All are made here, before ``two_gpus`` pretends to have GPUs."""
    models = (TEXT, IMAGES, ATTENTION, "Mamba2ForCausalLM")
    folders = {arch: make_checkpoint(arch, tmp_path_factory.mktemp(arch), with_tokenizer=True) for arch in models}
    return folders.__getitem__


@pytest.fixture(autouse=True)
def two_gpus(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.config.resolution.cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_every_setting_is_classified() -> None:
    names = [*EVERYWHERE, *WARNED, *REFUSED]
    assert sorted(names) == sorted(OPTIONS), "a new setting needs a line here: where does it change nothing?"


@pytest.mark.parametrize("name", WARNED)
def test_a_setting_without_effect_says_so(
    name: str, folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    value, idle_model, idle, model, settings = WARNED[name]
    value = str(folder_of(TEXT)) if name == "tokenizer" else value
    config = resolve(**{"model": str(folder_of(idle_model)), "device": "cpu", name: value} | idle)
    assert config.reasons[name].startswith("no effect: ")
    assert [m for m in caplog.messages if m.startswith(f"{name} has no effect: ")], caplog.messages
    caplog.clear()
    config = resolve(**{"model": str(folder_of(model)), "device": "cpu", name: value} | settings)
    assert "no effect" not in config.reasons.get(name, "") and not caplog.messages


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_cannot_mean_anything_is_refused(name: str, folder_of: Callable[[str], Path]) -> None:
    value, settings = REFUSED[name]
    settings = {"device": "cpu"} | settings | {"model": str(folder_of(settings.get("model", TEXT)))}
    with pytest.raises(ConfigError, match=f"{name}.*no effect"):
        resolve(**settings | {name: value})


def test_what_is_not_given_is_not_explained(folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(model=str(folder_of(ATTENTION)), device="cpu", disable_custom_all_reduce=False)
    assert [name for name, why in config.reasons.items() if "no effect" in why] == ["disable_custom_all_reduce"]
    assert not caplog.messages, "False turns nothing off that is on"


def test_sizes_of_both_pools_leave_nothing_to_the_budget(folder_of: Callable[[str], Path]) -> None:
    given = {"device": "cpu", "cpu_cache_gib": 1.5, "num_kv_pages": 40}
    assert "cpu_cache_gib" not in resolve(model=str(folder_of(TEXT)), **given).reasons
    for model, further in ((TEXT, {"num_state_slots": 9}), (ATTENTION, {})):
        config = resolve(model=str(folder_of(model)), **given, **further)
        assert config.reasons["cpu_cache_gib"].startswith("no effect: num_kv_pages")


def test_a_tower_that_is_left_out_is_named(folder_of: Callable[[str], Path]) -> None:
    config = resolve(
        model=str(folder_of(IMAGES)), device="cpu", language_model_only=True, limit_mm_per_prompt={"image": 1}
    )
    assert config.reasons["limit_mm_per_prompt"] == "no effect: language_model_only=True"


def test_the_start_log_has_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve(device="cpu", gpu_memory_utilization=0.9)
    assert caplog.messages == ["gpu_memory_utilization has no effect: there is no GPU; cpu_cache_gib bounds the caches"]
