"""Settings: automatic choices and their reasons, limits, and what is refused, by name."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from weft.assets import MODEL_DIR
from weft.config import EngineConfig, resolve
from weft.config.fields import OPTIONS
from weft.config.resolution import resolve_settings
from weft.config.tokenizer_eos import read_eos_token_id
from weft.config.vllm_settings import ANY, VLLM_SETTINGS
from weft.errors import ConfigError, UnsupportedModelError
from weft.text.tokenizer import Tokenizer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.config.resolution.cuda_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.config.resolution.cuda_available", lambda: False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_model_is_the_bundled_one(no_gpu: None) -> None:
    config = resolve()
    assert config.model_path == config.tokenizer_path == MODEL_DIR
    assert config.model == config.served_model_name == "weft-mini"
    assert config.model_config.architecture == "Qwen3NextForCausalLM"
    assert {"model", "device", "dtype", "max_model_len", "max_num_seqs"} <= set(config.reasons)


def test_nothing_is_left_automatic(no_gpu: None) -> None:
    config = resolve()
    assert "auto" not in {getattr(config, name) for name in ("dtype", "device", "backend", "mamba_ssm_dtype")}
    for name in ("model", "tokenizer", "served_model_name", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        assert getattr(config, name) is not None
    for name, option in OPTIONS.items():
        if getattr(config, name) != option.default:
            assert config.reasons[name], f"{name} was chosen without a reason"


def test_config_is_frozen_and_crosses_processes() -> None:
    config = resolve(device="cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cpu", "bfloat16", "bfloat16"),
        ("auto", "auto", "bfloat16"),
    ],
)
def test_dtype(gpu: None, device: str, dtype: str, expected: str) -> None:
    assert resolve(device=device, dtype=dtype).dtype == expected


def test_a_gpu_that_is_not_there(no_gpu: None) -> None:
    assert resolve(device="auto").device == "cpu"
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        resolve(device="cuda")


def test_given_values_stand(no_gpu: None) -> None:
    config = resolve(max_num_seqs=7, max_num_batched_tokens=65, max_model_len=130, num_kv_pages=63, page_size=1, seed=5)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (7, 65, 130)
    assert (config.num_kv_pages, config.page_size, config.seed) == (63, 1, 5)
    assert not {"max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_pages"} & set(config.reasons)


def test_automatic_max_num_seqs_stays_within_the_token_budget(no_gpu: None) -> None:
    config = resolve(max_num_batched_tokens=63)
    assert config.max_num_seqs == 63
    assert "max_num_batched_tokens" in config.reasons["max_num_seqs"]


def test_every_running_request_has_a_token_in_the_budget(no_gpu: None) -> None:
    assert resolve(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8
    for settings in ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, {"max_num_seqs": 4000}):
        with pytest.raises(ConfigError, match=r"max_num_seqs=.* is more than max_num_batched_tokens"):
            resolve(**settings)


def test_context_beyond_the_checkpoint_is_refused() -> None:
    assert resolve(max_model_len=4096).max_model_len == 4096
    with pytest.raises(ConfigError, match=r"max_model_len=4097.*4096"):
        resolve(max_model_len=4097)


def test_state_dtype_of_the_checkpoint(checkpoint: Path) -> None:
    edit(checkpoint, mamba_ssm_dtype="bfloat16")
    assert resolve(model=str(checkpoint)).mamba_ssm_dtype == "bfloat16"
    assert resolve(model=str(checkpoint), mamba_ssm_dtype="float32").mamba_ssm_dtype == "float32"


def test_ends_that_the_model_cannot_sample_do_not_count(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [5, 1000000]}')
    assert resolve(model=str(checkpoint)).eos_token_ids == (5,)


def test_the_eos_of_the_tokenizer_ends_texts_too(checkpoint: Path) -> None:
    """Chat fine-tunes name the end of a turn there, and in ``config.json`` still the end of a document."""
    (checkpoint / "generation_config.json").unlink()
    edit(checkpoint, eos_token_id=2039)
    assert resolve(model=str(checkpoint)).eos_token_ids == (2039,), "there is no tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, checkpoint)
    assert resolve(model=str(checkpoint)).eos_token_ids == (2039, 2041)
    assert resolve(model=str(checkpoint), skip_tokenizer_init=True).eos_token_ids == (2039,)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [2041, 2040]}')
    assert resolve(model=str(checkpoint)).eos_token_ids == (2041, 2040)
    edit(checkpoint, vocab_size=2041)
    assert resolve(model=str(checkpoint)).eos_token_ids == (2040,), "those that the model can sample"


@pytest.mark.parametrize(
    "eos", ["<|im_start|>", {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}, "not there", None]
)
def test_the_eos_of_the_tokenizer_is_that_of_the_loaded_one(tmp_path: Path, eos: Any) -> None:
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    # transformers writes this number for no limit
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": eos, "model_max_length": 10**30}))
    loaded = Tokenizer.load(tmp_path).eos_token_id
    assert read_eos_token_id(tmp_path) == (None if eos == "not there" else loaded)  # a loaded one gets a new id for it
    for broken in ("{", '{"eos_token": 5}', "[]"):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        assert read_eos_token_id(tmp_path) is None, "loading it tells what is wrong"


def test_tokenizer_from_elsewhere(checkpoint: Path) -> None:
    config = resolve(model=checkpoint, tokenizer=str(MODEL_DIR))
    assert (config.model_path, config.tokenizer_path) == (checkpoint, MODEL_DIR)


def test_names_of_other_engines_for_choices() -> None:
    for theirs, ours in (("extra_buffer", "aligned"), ("no_buffer", "finish_only"), ("exact", "exact")):
        assert resolve(state_checkpoint_policy=theirs).state_checkpoint_policy == ours


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "page_size=0 is out of range; allowed: 1 or more"),
        ({"page_size": 16.0}, "page_size=16.0 is not an integer"),
        ({"page_size": True}, "page_size=True is not an integer"),
        ({"page_size": "16"}, "page_size='16' is not an integer"),
        ({"num_kv_pages": 1}, "num_kv_pages=1 is out of range; allowed: 2 or more"),
        ({"max_num_batched_tokens": 65_536}, "=65536 is out of range; allowed: 1 or more and at most 65,535"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens=-5"),
        ({"gpu_memory_utilization": 0}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.01}, "above 0 and at most 1"),
        ({"cpu_cache_gib": float("nan")}, "cpu_cache_gib=nan is not a number"),
        ({"gpu_memory_utilization": 10**400}, "0 is out of range; allowed: above 0 and at most 1"),
        ({"seed": -1}, "seed=-1 is out of range; allowed: 0 or more and at most 9,223,"),
        ({"mm_processor_cache_gb": -0.5}, "mm_processor_cache_gb=-0.5 is out of range; allowed: 0.0 or more"),
        ({"dtype": "fp8"}, "dtype='fp8' is not known; allowed: auto, float32, float16, bfloat16"),
        ({"device": "tpu"}, "device='tpu' is not known; allowed: auto, cpu, cuda"),
        ({"load_format": "pt"}, "allowed: auto, dummy"),
        ({"skip_tokenizer_init": "yes"}, "not a truth value"),
        ({"model": ""}, "model='' is not a text"),
        ({"cuda_graph_bs": []}, "not a non-empty list"),
        ({"cuda_graph_bs": [0]}, "out of range"),
    ],
)
def test_bad_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(**settings)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_seqs", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("tp", "tensor_parallel_size"),
        ("context_length", "max_model_len"),
        ("frobnicate", "weft config"),
    ],
)
def test_unknown_settings_name_what_was_meant(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting '{name}'.*{hint}"):
        resolve(**{name: 1})


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"block_size": 16}, "here it is called page_size"),
        ({"pipeline_parallel_size": 2}, "use tensor_parallel_size or data_parallel_size"),
        ({"enable_chunked_prefill": False}, "raise max_num_batched_tokens"),
        ({"enable_lora": 1}, "merge the adapter"),
        ({"runner": "pooling"}, "models generate"),
    ],
)
def test_vllms_settings_say_what_to_write_instead(settings: dict[str, Any], hint: str) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ConfigError, match=rf"{name}={value!r} is a setting of vLLM that Weft does not have: .*{hint}"):
        resolve(**settings)


def test_vllms_settings_that_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {name: (setting.harmless or (None,))[0] for name, setting in VLLM_SETTINGS.items()}
    given |= {name: 4 for name, value in given.items() if value is ANY}
    assert resolve(device="cpu", **given) == resolve(device="cpu")
    told = {record.getMessage().partition(" ")[0] for record in caplog.records}
    assert told == {name for name, setting in VLLM_SETTINGS.items() if setting.harmless == (ANY,)}
    assert not VLLM_SETTINGS.keys() & OPTIONS.keys()


def test_the_page_names_all_of_vllms_settings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "offline.md").read_text()
    assert [name for name in VLLM_SETTINGS if f"`{name}`" not in page] == []


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(model=str(tmp_path / "nothing"))
    for name in ("~no-such-user/x", 3000 * "x", "x\0y"):
        with pytest.raises(ConfigError, match="there is no such folder; give a folder, or a hub id"):
            resolve(model=name)
    with pytest.raises(ConfigError, match="is a file"):
        (tmp_path / "file").write_text("")
        resolve(model=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(model=str(tmp_path))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host\nmore of it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"'some/model': .*no route to host\); check the name and the network"):
        resolve(model="some/model")


def test_a_model_on_the_hub_is_fetched_without_its_weights_if_only_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(MODEL_DIR)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    resolve_settings({"model": "some/model", "device": "cpu"}, weights=False)
    resolve(model="some/model", load_format="dummy", device="cpu")
    config = resolve(model="some/model", device="cpu")
    assert ["*.safetensors" in patterns for patterns in asked] == [False, False, True]
    assert (config.model_path, config.served_model_name) == (MODEL_DIR, "some/model")


def test_unsupported_architecture_is_passed_on(checkpoint: Path) -> None:
    edit(checkpoint, architectures=["NoSuchForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="NoSuchForCausalLM"):
        resolve(model=str(checkpoint))


def test_public_keywords_of_the_engine_are_settings() -> None:
    documented = {
        "model", "dtype", "device", "load_format", "skip_tokenizer_init", "max_model_len", "gpu_memory_utilization",
        "max_num_seqs", "max_num_batched_tokens", "num_kv_pages", "num_state_slots", "page_size", "cpu_cache_gib",
        "tensor_parallel_size", "enforce_eager", "cuda_graph_mode", "enable_prefix_caching", "state_checkpoint_policy",
        "seed",
    }  # fmt: skip
    assert documented <= set(OPTIONS)
    assert set(OPTIONS) < {f.name for f in dataclasses.fields(EngineConfig)}


def test_graphs_and_overlap_follow_the_device(no_gpu: None) -> None:
    config = resolve()
    assert (config.cuda_graph_mode, config.enable_overlap, config.backend) == ("NONE", False, "torch")
    assert {"cuda_graph_mode", "enable_overlap", "backend"} <= set(config.reasons)
    given = resolve(cuda_graph_mode="FULL_DECODE_ONLY", cuda_graph_bs=[1, 4], enable_overlap=True)
    assert (given.cuda_graph_mode, given.cuda_graph_bs, given.enable_overlap) == ("FULL_DECODE_ONLY", (1, 4), True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enforce_eager": True, "cuda_graph_mode": "FULL_DECODE_ONLY"}, "contradicts"),
        ({"cuda_graph_bs": [1], "cuda_graph_mode": "NONE"}, "has no effect"),
        ({"cuda_graph_max_bs": 8, "enforce_eager": True}, "has no effect"),
        ({"enforce_eager": True, "enable_piecewise_cuda_graph": True}, "contradicts"),
        (
            {"cuda_graph_mode": "FULL_DECODE_ONLY", "enable_piecewise_cuda_graph": True},
            "contradicts.*PIECEWISE or FULL_AND_PIECEWISE",
        ),
        ({"cuda_graph_mode": "PIECEWISE", "cuda_graph_bs": [1]}, "cuda_graph_bs.*no effect.*'PIECEWISE'"),
        ({"piecewise_cuda_graph_tokens": [16]}, "no effect with cuda_graph_mode='NONE'"),
        ({"cuda_graph_mode": "FULL_DECODE_ONLY", "piecewise_cuda_graph_max_tokens": 16}, "no effect"),
        ({"cuda_graph_mode": "PIECEWISE", "enable_piecewise_cuda_graph": False}, "graph=False contradicts"),
        ({"enable_torch_compile_debug_mode": True}, "no effect"),
        ({"enable_cudagraph_gc": True}, "enable_cudagraph_gc=True has no effect with cuda_graph_mode='NONE'"),
        (
            {"piecewise_cuda_graph_compiler": "eager", "cuda_graph_mode": "FULL"},
            "no effect with cuda_graph_mode='FULL'",
        ),
        ({"splitting_ops": ["attention"]}, "splitting_ops.*no effect"),
        ({"enable_torch_compile": True}, "no effect with cuda_graph_mode='NONE'"),
        ({"enable_torch_compile": True, "cuda_graph_mode": "PIECEWISE"}, "no effect"),
        ({"torch_compile_max_bs": 8, "cuda_graph_mode": "FULL"}, "no effect without enable_torch_compile"),
    ],
)
def test_contradicting_graph_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(device="cpu", **settings)


def test_compiled_decodes_have_a_limit() -> None:
    config = resolve(device="cpu", cuda_graph_mode="FULL_DECODE_ONLY", enable_torch_compile=True)
    assert config.torch_compile_max_bs == 32 and "torch_compile_max_bs" in config.reasons
    given = resolve(device="cpu", cuda_graph_mode="FULL", enable_torch_compile=True, torch_compile_max_bs=4)
    assert given.torch_compile_max_bs == 4
    assert resolve(device="cpu", cuda_graph_mode="FULL").torch_compile_max_bs is None


def test_pieces_by_flag_or_by_mode() -> None:
    default = resolve(device="cpu")
    assert (default.cuda_graph_mode, default.enable_piecewise_cuda_graph) == ("NONE", False)
    assert default.piecewise_cuda_graph_max_tokens is None
    by_flag = resolve(device="cpu", enable_piecewise_cuda_graph=True, max_num_batched_tokens=4096)
    assert by_flag.cuda_graph_mode == "PIECEWISE" and by_flag.piecewise_cuda_graph_max_tokens == 512
    assert by_flag.reasons["cuda_graph_mode"] == "enable_piecewise_cuda_graph"
    by_mode = resolve(device="cpu", cuda_graph_mode="FULL_AND_PIECEWISE", max_num_batched_tokens=210)
    assert by_mode.enable_piecewise_cuda_graph and by_mode.piecewise_cuda_graph_max_tokens == 210
    assert by_mode.reasons["enable_piecewise_cuda_graph"] == "cuda_graph_mode=FULL_AND_PIECEWISE"
    by_list = resolve(device="cpu", cuda_graph_mode="PIECEWISE", piecewise_cuda_graph_tokens=[16])
    assert by_list.piecewise_cuda_graph_max_tokens is None


@pytest.mark.parametrize(
    ("name", "value"), [("state_checkpoint_policy", "exact"), ("eviction_policy", "flops"), ("schedule_policy", "lpm")]
)
def test_settings_of_a_cache_that_is_off_are_refused(no_gpu: None, name: str, value: str) -> None:
    assert getattr(resolve(**{name: value}), name) == value
    with pytest.raises(ConfigError, match=f"{name}='{value}' has no effect with enable_prefix_caching=False"):
        resolve(enable_prefix_caching=False, **{name: value})
    assert not resolve(enable_prefix_caching=False).enable_prefix_caching
