"""``weft config``: every setting, its value, and why; and the capacity of the caches.

Job: resolve the settings as the engine would, plan the caches if that needs no measurement, and show both. Owns: the
layout. Does not know: weights. torch is imported only to check names of split ops.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from weft.bench import report
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb
from weft.config.fields import OPTIONS, EngineConfig
from weft.config.layer_spec import DTYPE_BYTES
from weft.config.model import Mixers
from weft.config.resolution import resolve_settings
from weft.config.weights import rank_weight_bytes, tower_bytes
from weft.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from weft.cache.spec import CacheSpec

MEASURED = "measured when the engine starts: what the GPU has left beside weights, the largest step and graphs"


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "config", run, help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = resolve_settings(engine_settings(args), weights=False)
    _check_split_ops(config)
    if args.json:
        print(json.dumps(config_json(config) | {"capacity": capacity(config)}, indent=1, default=_plain))
    else:
        _print_tables(config, given=engine_settings(args))
    return 0


def _check_split_ops(config: EngineConfig) -> None:
    """Refuse names of split ops that no layer defines. Layers need torch, so they are imported only if names are
    given."""
    if config.splitting_ops is not None:
        from weft.layers.table import import_layers
        from weft.pieces.split_points import select_split_ops

        import_layers()
        select_split_ops(config.splitting_ops)


def config_json(config: EngineConfig) -> dict[str, Any]:
    """Settings, reasons, and properties of the checkpoint as JSON, with ``_plain`` for other values."""
    return {
        "settings": report.settings(config),
        "reasons": dict(config.reasons),
        "model_path": str(config.model_path),
        "tokenizer_path": str(config.tokenizer_path),
        "model_config": dataclasses.asdict(config.model_config),
        "generation": dataclasses.asdict(config.generation),
    }


def capacity(config: EngineConfig) -> dict[str, Any]:
    """The capacity of a rank's caches in bytes, tokens and requests; on a GPU only the cost of each page and slot.

    The bytes of the weights are added and, on a GPU, the bytes that remain. ``reasons`` has the reason for a number;
    ``error`` says why nothing fits.
    """
    from weft.cache.plan import plan_for
    from weft.cache.spec import CacheSpec

    spec = CacheSpec.of(config)
    weights = rank_weight_bytes(config.model_config, config.dtype, config.tensor_parallel_size)
    costs: dict[str, Any] = {
        "weight_bytes": weights, "kv_page_bytes": spec.page_bytes, "state_slot_bytes": spec.slot_bytes,
    }  # fmt: skip
    if config.encoder_cache_size is not None:
        costs["vision_tower_bytes"] = tower_bytes(config.model_config, config.dtype)
        costs["encoder_cache_bytes"] = encoder_cache_bytes(config)
    costs |= _host_tier(config, spec)
    if config.device != "cpu":
        measured = {"num_kv_pages": MEASURED, "num_state_slots": MEASURED}
        return costs | on_gpu(weights, config.gpu_memory_utilization, gpu_bytes()) | {"reasons": measured}
    try:
        plan = plan_for(config, spec, int(config.cpu_cache_gib * 2**30))
    except CapacityError as error:
        return costs | {"error": str(error)}
    return costs | {
        "num_kv_pages": plan.num_pages,
        "num_state_slots": plan.num_slots,
        "cache_bytes": plan.cache_bytes,
        "kv_tokens": (plan.num_pages - 1) * spec.page_size,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "full_contexts": plan.num_full_contexts(spec.page_size),
        "reasons": plan.reasons,
    }


def _host_tier(config: EngineConfig, spec: CacheSpec) -> dict[str, Any]:
    """The places of the tier in host memory, if there is one."""
    if not config.kv_offloading_size:
        return {}
    from weft.offload.plan import plan_tier

    try:
        plan = plan_tier(config, spec)
    except ConfigError as error:
        return {"host_reasons": {"host_error": str(error)}}
    return {"host_pages": plan.num_pages, "host_states": plan.num_slots, "host_reasons": plan.reasons}


def encoder_cache_bytes(config: EngineConfig) -> int:
    """Bytes of the cached image embeddings."""
    vision = config.model_config.vision
    assert vision is not None and config.encoder_cache_size is not None, "a vision tower runs"
    entry = vision.num_features * config.model_config.hidden_size * DTYPE_BYTES[config.dtype]
    return config.encoder_cache_size * entry


def on_gpu(weights: int, utilization: float, total: int) -> dict[str, Any]:
    """The bytes that the weights leave on a GPU of ``total`` bytes; ``error`` if there are none."""
    left = int(utilization * total) - weights
    if left > 0:
        return {"free_bytes": left}
    return {
        "error": f"the weights take {weights / 2**30:.1f} GiB, and gpu_memory_utilization={utilization} of this GPU is "
        f"{utilization * total / 2**30:.1f} GiB; use more GPUs (tensor_parallel_size), a quantised checkpoint, "
        "or quantization=fp8 or int4"
    }


def gpu_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[1])


def _plain(value: Any) -> Any:
    return value.as_dicts() if isinstance(value, Mixers) else sorted(value)  # a set


def _print_tables(config: EngineConfig, given: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings = Table("setting", "value", "why", title=f"Settings for {config.model}", title_justify="left")
    for name in OPTIONS:
        reason = config.reasons.get(name) or ("given" if name in given else "default")
        settings.add_row(name, _shown(getattr(config, name)), reason)
    console.print(settings)
    found = Table("found in the checkpoint", "", title_justify="left")
    for name, value in _found(config).items():
        found.add_row(name, value)
    console.print(found)
    ranks = config.tensor_parallel_size
    caches = Table("caches" if ranks == 1 else f"caches of each of {ranks} ranks", "", "why", title_justify="left")
    for row in _capacity_rows(capacity(config)):
        caches.add_row(*row)
    console.print(caches)


def _capacity_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    reasons: dict[str, str] = found.get("reasons", {})
    rows = [
        (
            "bytes of the weights",
            f"{found['weight_bytes']:,}",
            "linear layers, experts, vision tower, embedding and head",
        ),
        ("bytes of a KV page", f"{found['kv_page_bytes']:,}", ""),
        ("bytes of a state slot", f"{found['state_slot_bytes']:,}", ""),
    ]
    if "encoder_cache_bytes" in found:
        rows.append(
            ("bytes of the vision tower", f"{found['vision_tower_bytes']:,}", "among the weights, on every rank")
        )
        rows.append(("bytes of images' embeddings", f"{found['encoder_cache_bytes']:,}", "encoder_cache_size"))
    titles = {"host_pages": "KV pages in host memory", "host_states": "states in host memory", "host_error": "no tier"}
    for name, reason in found.get("host_reasons", {}).items():
        rows.append((titles[name], f"{found[name]:,}" if name in found else "", reason))
    if "error" in found:
        return [*rows, ("nothing fits", "", found["error"])]
    names = {
        "free_bytes": "bytes beside the weights",
        "num_kv_pages": "KV pages",
        "num_state_slots": "state slots",
        "cache_bytes": "bytes in all",
        "kv_tokens": "tokens of KV",
        "max_model_len": "longest sequence",
        "max_num_seqs": "requests at a time",
        "full_contexts": "of the longest sequence",
    }
    for name, title in names.items():
        if name in found or name in reasons:
            value = f"{found[name]:,}" if name in found else "-"
            rows.append((title, value, reasons.get(name, "")))
    return rows


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _found(config: EngineConfig) -> dict[str, str]:
    model, generation = config.model_config, config.generation
    rows = {
        "folder": str(config.model_path),
        "architecture": model.architecture,
        "layers": ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in sorted(Counter(model.layer_types).items())),
        "hidden size, vocabulary": f"{model.hidden_size}, {model.vocab_size}",
        "context": f"{model.max_position_embeddings} tokens",
        "dtype": model.dtype,
        "EOS ids": _shown(config.eos_token_ids or None),
    }
    if model.moe is not None:
        rows["experts"] = f"{model.moe.num_experts}, {model.moe.num_experts_per_tok} per token"
    unusable = sorted(set(generation.eos_token_ids or model.eos_token_ids) - set(config.eos_token_ids))
    if unusable:
        rows["EOS ids not used"] = f"{_shown(tuple(unusable))}: the vocabulary has {model.vocab_size} ids"
    for name, value in dataclasses.asdict(generation).items():
        if value is not None and value != ():
            rows[f"generation: {name}"] = _shown(value)
    return rows
