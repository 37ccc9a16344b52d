"""Resolution of settings: from user input, checkpoint and device to an ``EngineConfig``, with reasons.

Job: validate the user's settings, read the checkpoint's config, choose the open settings, and record why. Owns: the
rules of automatic choices. Does not know: flags, or memory (pool sizes are planned later, from measurements).

torch is imported only if a choice depends on a GPU and a driver is installed.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from weft.config.capability import check_fp8
from weft.config.checkpoint import read_checkpoint_config
from weft.config.determinism import choose_determinism
from weft.config.draft_choice import choose_drafts, choose_speculation
from weft.config.effects import explain_no_effects
from weft.config.fields import OPTIONS, EngineConfig
from weft.config.generation import read_generation_config
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.config.graph_profile import differences, empty_profile, find_profile, read_profile
from weft.config.layer_spec import CacheDtypes
from weft.config.locate import BUNDLED_NAME, locate
from weft.config.model import ModelConfig
from weft.config.parallelism import choose_parallelism
from weft.config.quantization import ONLINE_FORMS
from weft.config.tokenizer_eos import read_eos_token_id
from weft.config.validate import check_names, check_value
from weft.config.vision_settings import choose_encoder_graphs, choose_vision
from weft.config.vllm_settings import without_vllms
from weft.errors import ConfigError
from weft.platforms.triton_version import kernel_choice, triton_version
from weft.processes.preload import has_driver, import_torch

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
MAX_EMULATED_TOKENS, MAX_CAPTURED_TOKENS = 512, 4096
MAX_COMPILED_BATCH = 32


def resolve(**user: Any) -> EngineConfig:
    """Resolve every setting of the engine from the settings of the user.

    Args:
        **user: fields of ``EngineConfig``. None means "not given".

    Raises:
        ConfigError: an unknown name (similar names are suggested), a value that is not allowed, or a contradiction
            between settings, or between settings and checkpoint.
        UnsupportedModelError: the checkpoint is not supported.
    """
    return resolve_settings(user, weights=True)


def resolve_settings(user: Mapping[str, Any], *, weights: bool) -> EngineConfig:
    """Resolve a mapping of settings. With ``weights=False`` the weights of a model on the hub are not downloaded."""
    user, warnings = without_vllms(user)
    for warning in warnings:
        logger.warning(warning)
    check_names(user)
    values = {name: option.default for name, option in OPTIONS.items()}
    values |= {name: check_value(name, value) for name, value in user.items() if value is not None}
    reasons: dict[str, str] = {}
    model_path = locate(values["model"], weights=weights and values["load_format"] != "dummy")
    tokenizer_path = locate(values["tokenizer"], weights=False) if values["tokenizer"] else model_path
    model = _choose_quantization(values, reasons, read_checkpoint_config(model_path))
    generation = read_generation_config(model_path)
    given = {name for name, value in user.items() if value is not None}
    _check_cache_settings(values, given)
    _choose_disk_tier(values, reasons, given)
    _choose_names(values, reasons)
    plain, model = model, choose_speculation(values, reasons, model)
    _choose_device(values, reasons)
    check_fp8(values, model)
    choose_parallelism(values, reasons, model, given)
    _choose_dtypes(values, reasons, model)
    _choose_context(values, reasons, model)
    _choose_batch_limits(values, reasons)
    model = choose_vision(values, reasons, model, model_path)
    plain = plain.with_vision() if model.runs_vision else plain
    _choose_graphs(values, reasons, model, given)
    choose_encoder_graphs(values, reasons, model)
    _choose_piece_sizes(values, reasons)
    choose_determinism(values, reasons, model, given)
    model = choose_drafts(values, reasons, plain, model)
    _explain_pools(values, reasons)
    for warning in explain_no_effects(values, reasons, model, given):
        logger.warning(warning)
    return EngineConfig(
        **values,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        model_config=model,
        generation=generation,
        tokenizer_eos_token_id=None if values["skip_tokenizer_init"] else read_eos_token_id(tokenizer_path),
        reasons=reasons,
    )


def _check_cache_settings(values: dict[str, Any], given: Set[str]) -> None:
    """Refuse settings that have no effect without the prefix cache."""
    if values["enable_prefix_caching"]:
        return
    for name in ("state_checkpoint_policy", "eviction_policy", "kv_offloading_size"):
        if name in given and values[name]:
            raise ConfigError(
                f"{name}={values[name]!r} has no effect with enable_prefix_caching=False; leave one of them out"
            )
    if values["schedule_policy"] == "lpm":
        raise ConfigError(
            "schedule_policy='lpm' has no effect with enable_prefix_caching=False: no prefix is ever found; "
            "allowed then are fcfs and priority"
        )


def _choose_disk_tier(values: dict[str, Any], reasons: dict[str, str], given: Set[str]) -> None:
    """Choose the size of the disk tier. Refuse a disk tier without a host tier, and settings without a disk tier."""
    size, folder = values["kv_offloading_size"], values["kv_offloading_dir"]
    if folder is not None and not size:
        raise ConfigError(
            f"kv_offloading_dir={str(folder)!r} has no effect without kv_offloading_size; give both or none"
        )
    for name in ("kv_offloading_disk_size", "kv_offloading_disk_hours"):
        if folder is None and name in given:
            raise ConfigError(f"{name}={values[name]} has no effect without kv_offloading_dir; give both or none")
    if folder is not None and values["kv_offloading_disk_size"] is None:
        values["kv_offloading_disk_size"] = 4 * size
        reasons["kv_offloading_disk_size"] = "four times kv_offloading_size"


def _choose_quantization(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig) -> ModelConfig:
    """Return the model with the quantisation of its stored weights."""
    if model.quantization is not None:
        values["quantization"] = model.quantization.name
        reasons["quantization"] = f"the checkpoint's ({model.quantization.source})"
    elif values["quantization"] is not None:
        return dataclasses.replace(model, quantization=ONLINE_FORMS[values["quantization"]])
    return model


def _choose_names(values: dict[str, Any], reasons: dict[str, str]) -> None:
    if values["model"] is None:
        values["model"] = BUNDLED_NAME
        reasons["model"] = "no model was given: the bundled one"
    if values["tokenizer"] is None:
        values["tokenizer"] = values["model"]
        reasons["tokenizer"] = "the model's"
    if values["served_model_name"] is None:
        values["served_model_name"] = values["model"]
        reasons["served_model_name"] = "as the model was given"


def _choose_device(values: dict[str, Any], reasons: dict[str, str]) -> None:
    if values["device"] == "auto":
        values["device"] = "cuda" if cuda_available() else "cpu"
        reasons["device"] = "a CUDA GPU is there" if values["device"] == "cuda" else "no CUDA GPU that torch can use"
    elif values["device"] == "cuda" and not cuda_available():
        raise ConfigError(
            "device='cuda', but torch finds no CUDA GPU here; use device='cpu' or install torch with CUDA"
        )
    on_cpu = values["device"] == "cpu"
    if values["backend"] == "auto":
        values["backend"] = "torch" if on_cpu else "triton"
        reasons["backend"] = "the CPU has no other" if on_cpu else "the Triton kernels are the GPU's default"
    if values["backend"] == "triton":
        reasons["backend"] = f"{reasons.get('backend', 'given')}; {kernel_choice(triton_version())}"
    if values["enable_overlap"] is None:
        values["enable_overlap"] = not on_cpu
        reasons["enable_overlap"] = (
            "the CPU computes in the calling thread: nothing to overlap"
            if on_cpu
            else "the host works while the GPU does"
        )


def _choose_graphs(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig, given: Set[str]) -> None:
    mode, pieces = values["cuda_graph_mode"], values["enable_piecewise_cuda_graph"]
    if values["enforce_eager"] and mode not in (None, "NONE"):
        raise ConfigError(f"enforce_eager=True contradicts cuda_graph_mode={mode!r}; leave one of them out")
    if values["enforce_eager"] and pieces:
        raise ConfigError("enforce_eager=True contradicts enable_piecewise_cuda_graph=True; leave one of them out")
    if values["device"] == "cuda" and values["backend"] == "torch" and (pieces or mode not in (None, "NONE")):
        raise ConfigError(
            "backend='torch' reads sizes on the host, which no CUDA graph can; leave the graph settings out, or use "
            "backend='triton'"
        )
    if pieces and mode not in (None, *_MODES_WITH_PIECES):
        raise ConfigError(
            f"enable_piecewise_cuda_graph=True contradicts cuda_graph_mode={mode!r}; leave it out, or use "
            "PIECEWISE or FULL_AND_PIECEWISE"
        )
    _choose_compiled_batch(values, reasons)
    _choose_graph_profile(values, reasons, model, names_pieces="enable_piecewise_cuda_graph" in given)
    if mode is None:
        mode, reasons["cuda_graph_mode"] = _default_graph_mode(values)
        values["cuda_graph_mode"] = mode
    elif mode in _MODES_WITH_PIECES and not pieces:
        if "enable_piecewise_cuda_graph" in given:
            raise ConfigError(
                f"enable_piecewise_cuda_graph=False contradicts cuda_graph_mode={mode!r}; leave one of them out"
            )
        values["enable_piecewise_cuda_graph"] = True
        reasons["enable_piecewise_cuda_graph"] = f"cuda_graph_mode={mode}"
    _refuse_without_effect(values, _CAPTURE_SETTINGS, mode == CudaGraphMode.NONE)
    _refuse_without_effect(values, _DECODE_GRAPH_SETTINGS, mode not in _MODES_WITH_DECODE_GRAPHS)
    _refuse_without_effect(values, _TOKEN_SETTINGS, mode not in _MODES_WITH_MIXED_GRAPHS)
    _refuse_without_effect(values, _PIECES_SETTINGS, mode not in _MODES_WITH_PIECES)


def _choose_graph_profile(
    values: dict[str, Any], reasons: dict[str, str], model: ModelConfig, *, names_pieces: bool
) -> None:
    """Find the profile of measured modes, unless a setting names a mode. None: the rules of the mode apply."""
    name, given = "graph_profile", values["graph_profile"]
    named = next((mode for mode in ("cuda_graph_mode", "enforce_eager") if values[mode]), None)
    if named is None and names_pieces:  # an empty list counts as a setting
        named = "enable_piecewise_cuda_graph"
    if given == NO_PROFILE or (given is None and named is not None):
        values[name] = None
        reasons[name] = "asked for" if given else f"{named} says how batches run"
        return
    if named is not None:
        raise ConfigError(f"{name}={given!r} contradicts {named}={values[named]!r}; leave one of them out")
    tuned = values | {"cuda_graph_mode": TUNED}
    _choose_piece_sizes(tuned, {})
    if given is None:
        path, reasons[name] = find_profile(tuned, model)
        values[name] = str(path) if path is not None else None
        _take_measured_splits(values, reasons)
        return
    values[name] = os.path.expanduser(given)
    misfits = differences(read_profile(Path(values[name])), empty_profile(tuned, model))
    if misfits:
        raise ConfigError(
            f"{name}={given!r} was measured for something else: {'; '.join(misfits)}; "
            f"run `weft tune` with these settings, or give {name}={NO_PROFILE!r}"
        )
    _take_measured_splits(values, reasons)


def _take_measured_splits(values: dict[str, Any], reasons: dict[str, str]) -> None:
    """Use the split points of the profile, unless the user names some."""
    if values["graph_profile"] is None or values["splitting_ops"] is not None:
        return
    if measured := read_profile(Path(values["graph_profile"])).splitting_ops:
        values["splitting_ops"] = tuple(measured)
        reasons["splitting_ops"] = "the fastest pieces that `weft tune` measured"


def _choose_compiled_batch(values: dict[str, Any], reasons: dict[str, str]) -> None:
    name = "torch_compile_max_bs"
    if not values["enable_torch_compile"]:
        if values[name] is not None:
            raise ConfigError(
                f"{name}={values[name]} has no effect without enable_torch_compile=True; give both or none"
            )
        return
    if values[name] is None:
        values[name] = MAX_COMPILED_BATCH
        reasons[name] = "larger batches gain little: they compute more than they launch"


TUNED = str(CudaGraphMode.TUNED)
NO_PROFILE = "none"

_MODES_WITH_PIECES = tuple(str(mode) for mode in CudaGraphMode if GraphMode.PIECEWISE in mode.mixed)
_MODES_WITH_MIXED_GRAPHS = tuple(str(mode) for mode in CudaGraphMode if mode.mixed)
_MODES_WITH_DECODE_GRAPHS = tuple(str(mode) for mode in CudaGraphMode if GraphMode.FULL in mode.decode)
_CAPTURE_SETTINGS = ("enable_torch_compile_debug_mode", "enable_cudagraph_gc")
_DECODE_GRAPH_SETTINGS = ("cuda_graph_bs", "cuda_graph_max_bs", "enable_torch_compile")
_TOKEN_SETTINGS = ("piecewise_cuda_graph_tokens", "piecewise_cuda_graph_max_tokens")
_PIECES_SETTINGS = ("splitting_ops", "piecewise_cuda_graph_compiler")


def _default_graph_mode(values: dict[str, Any]) -> tuple[str, str]:
    """Choose the mode that the user left open. Returns mode and reason."""
    on_cpu = values["device"] == "cpu"
    if values["graph_profile"]:
        return TUNED, "graph_profile"
    if values["enable_piecewise_cuda_graph"]:
        return "PIECEWISE" if on_cpu else "FULL_AND_PIECEWISE", "enable_piecewise_cuda_graph"
    if values["enforce_eager"]:
        return "NONE", "enforce_eager"
    if on_cpu:
        return "NONE", "the CPU has no graphs"
    if values["backend"] == "torch":
        return "NONE", "torch's operations read sizes on the host"
    return "FULL", "default on cuda"


def _refuse_without_effect(values: dict[str, Any], names: tuple[str, ...], without_effect: bool) -> None:
    for name in names:
        if without_effect and values[name] != OPTIONS[name].default:
            mode = values["cuda_graph_mode"]
            raise ConfigError(
                f"{name}={values[name]!r} has no effect with cuda_graph_mode={mode!r}; leave one of them out"
            )


def _choose_piece_sizes(values: dict[str, Any], reasons: dict[str, str]) -> None:
    """Choose the largest captured token count, unless the user lists the counts."""
    name, budget = "piecewise_cuda_graph_max_tokens", values["max_num_batched_tokens"]
    captured = values["cuda_graph_mode"] in _MODES_WITH_MIXED_GRAPHS
    if captured and not values["piecewise_cuda_graph_tokens"] and values[name] is None:
        on_cpu = values["device"] == "cpu"
        values[name] = min(budget, MAX_EMULATED_TOKENS if on_cpu else MAX_CAPTURED_TOKENS)
        why = "the emulator keeps every tensor" if on_cpu else "longer steps wait for the GPU, with graphs or without"
        reasons[name] = why if values[name] < budget else "max_num_batched_tokens"


def _choose_dtypes(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig) -> None:
    if values["dtype"] == "auto":
        on_cpu = values["device"] == "cpu"
        values["dtype"] = "float32" if on_cpu else model.dtype
        reasons["dtype"] = "float32 on the CPU" if on_cpu else "the checkpoint's"
    if values["mamba_ssm_dtype"] == "auto":
        values["mamba_ssm_dtype"] = model.state_dtype or "float32"
        reasons["mamba_ssm_dtype"] = "the checkpoint's" if model.state_dtype else "the checkpoint names none"
    if values["kv_cache_dtype"] == "fp8" and not _has_fp8_tensors(model):
        raise ConfigError(
            f"kv_cache_dtype=fp8 has no effect with {model.architecture}: keys and values in pages can be FP8, but not "
            "latents, windows or states; leave it out"
        )


def _has_fp8_tensors(model: ModelConfig) -> bool:
    specs = model.layer_specs(CacheDtypes(kv="float8_e4m3fn")).values()
    return any(tensor.dtype == "float8_e4m3fn" for spec in specs for tensor in spec.paged)


def _choose_context(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig) -> None:
    limit, given = model.max_position_embeddings, values["max_model_len"]
    if given is None:
        values["max_model_len"] = limit
        reasons["max_model_len"] = "the checkpoint's (max_position_embeddings)"
    elif given > limit:
        raise ConfigError(
            f"max_model_len={given}: the checkpoint's positions end at {limit} (max_position_embeddings); "
            f"give {limit} or less"
        )


def _choose_batch_limits(values: dict[str, Any], reasons: dict[str, str]) -> None:
    device = values["device"]
    if values["max_num_batched_tokens"] is None:
        values["max_num_batched_tokens"] = MAX_NUM_BATCHED_TOKENS[device]
        reasons["max_num_batched_tokens"] = f"default on {device}"
    budget = values["max_num_batched_tokens"]
    if values["max_num_seqs"] is None:
        values["max_num_seqs"] = min(MAX_NUM_SEQS[device], budget)
        clamped = budget < MAX_NUM_SEQS[device]
        reasons["max_num_seqs"] = "no more than max_num_batched_tokens" if clamped else f"default on {device}"
    elif values["max_num_seqs"] > budget:
        raise ConfigError(
            f"max_num_seqs={values['max_num_seqs']} is more than max_num_batched_tokens={budget}; every running "
            "request takes a token of each step's budget: raise the budget or lower max_num_seqs"
        )


def _explain_pools(values: dict[str, Any], reasons: dict[str, str]) -> None:
    for name in ("num_kv_pages", "num_state_slots"):
        if values[name] is None:
            reasons[name] = "planned when the engine starts, from the memory there is"


def cuda_available() -> bool:
    """Whether torch can use a CUDA GPU. Without an NVIDIA driver it cannot, and torch is not imported."""
    if not has_driver():
        return False
    import_torch()  # a slow import, needed only with a driver
    import torch

    return torch.cuda.is_available()
