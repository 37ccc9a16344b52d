"""Settings that were given and change nothing here: each gets a reason in ``weft config`` and a warning at the start.

A script that many machines share may name such settings, so they are not refused. Contradictions are refused where the
setting is chosen.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from weft.config.model import ModelConfig

_MEDIA = ("limit_mm_per_prompt", "mm_processor_cache_gb", "allowed_local_media_path", "allowed_media_domains")
_STATES = ("num_state_slots", "mamba_ssm_dtype", "state_checkpoint_policy")


def explain_no_effects(
    values: Mapping[str, Any], reasons: dict[str, str], model: ModelConfig, given: Set[str]
) -> list[str]:
    """Add a reason for each of the user's settings (``given``) that has no effect. Returns a warning for each. False
    turns off what is off anyway, which is worth no warning."""
    idle = {name: why for name, why in _without_effect(values, reasons, model) if name in given}
    for name, why in idle.items():
        reasons[name] = f"no effect: {why}"
    return [f"{name} has no effect: {why}" for name, why in idle.items() if values[name] is not False]


def _without_effect(
    values: Mapping[str, Any], reasons: Mapping[str, str], model: ModelConfig
) -> Iterator[tuple[str, str]]:
    """Yield every setting without effect, with the reason."""
    on_cpu, states = values["device"] == "cpu", model.is_hybrid
    if on_cpu:
        yield "gpu_memory_utilization", "there is no GPU; cpu_cache_gib bounds the caches"
        yield "disable_custom_all_reduce", "the kernel for all-reduces needs GPUs"
    elif values["tensor_parallel_size"] == 1:
        yield "disable_custom_all_reduce", "one rank has nothing to reduce"
    if not on_cpu:
        yield "cpu_cache_gib", "the caches are on the GPU; gpu_memory_utilization bounds them"
    elif values["num_kv_pages"] is not None and (values["num_state_slots"] is not None or not states):
        yield "cpu_cache_gib", "num_kv_pages" + (" and num_state_slots" if states else "") + " say how much is cached"
    if values["language_model_only"]:
        why = reasons["language_model_only"].replace("asked for", "language_model_only=True")
        yield from ((name, why) for name in _MEDIA)
    if not values["kv_offloading_size"]:
        yield "kv_offloading_policy", "kv_offloading_size gives no memory"
    if not states:
        yield from ((name, f"{model.architecture} has no recurrent layers") for name in _STATES)
    if values["skip_tokenizer_init"]:
        yield "tokenizer", "skip_tokenizer_init=True"
