"""Arguments of vLLM's ``LLM`` that Weft lacks. Values that change nothing are accepted, others refused.

Scripts often state vLLM's defaults, so these are accepted without a warning. ``ANY``: no value would change an answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError

ANY = object()


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A setting of vLLM.

    Attributes:
        harmless: values that match Weft's behaviour. None always does.
        why: with ``ANY``, the reason why it has no effect; otherwise the remedy.
    """

    harmless: tuple[Any, ...]
    why: str


def _no_effect(why: str) -> Elsewhere:
    return Elsewhere((ANY,), why)


def _renamed(name: str) -> Elsewhere:
    return Elsewhere((), f"here it is called {name}")


VLLM_SETTINGS: Mapping[str, Elsewhere] = {
    "trust_remote_code": _no_effect("the code of a checkpoint is never run"),
    "disable_log_stats": _no_effect("stats() and RequestOutput.metrics are always there, nothing of it is logged"),
    "disable_log_requests": _no_effect("prompts and answers are never logged"),
    "swap_space": _no_effect("preempted requests are computed again from what the prefix cache kept"),
    "preemption_mode": _no_effect("preempted requests are computed again from what the prefix cache kept"),
    "max_parallel_loading_workers": _no_effect("weights are read as fast as the disk gives them"),
    "max_seq_len_to_capture": _no_effect("captured graphs hold sequences of any length"),
    "use_v2_block_manager": _no_effect("there is one cache manager"),
    "num_scheduler_steps": _no_effect("steps are overlapped, see enable_overlap"),
    "disable_cascade_attn": _no_effect("there is no cascade attention"),
    "guided_decoding_backend": _no_effect("llguidance is used"),
    "enable_chunked_prefill": Elsewhere((True,), "prompts are always computed in chunks; raise max_num_batched_tokens"),
    "enable_lora": Elsewhere((False,), "LoRA is not supported; merge the adapter into the checkpoint"),
    "pipeline_parallel_size": Elsewhere((1,), "use tensor_parallel_size or data_parallel_size"),
    "cpu_offload_gb": Elsewhere((0,), "weights stay on the device; use quantization, or tensor_parallel_size"),
    "kv_offloading_backend": Elsewhere(("native",), "give kv_offloading_size alone; the tier is Weft's own"),
    "tokenizer_mode": Elsewhere(("auto", "hf"), "the checkpoint's tokenizer.json is read"),
    "config_format": Elsewhere(("auto", "hf"), "Hugging Face checkpoints are read"),
    "task": Elsewhere(("auto", "generate"), "models generate; no embeddings, scores or classes"),
    "runner": Elsewhere(("auto", "generate"), "models generate; no embeddings, scores or classes"),
    "convert": Elsewhere(("auto", "none"), "models generate; no embeddings, scores or classes"),
    "generation_config": Elsewhere(("auto",), "the checkpoint's is read; give what differs in SamplingParams"),
    "override_generation_config": Elsewhere(({},), "give what differs in SamplingParams"),
    "hf_overrides": Elsewhere(({},), "change config.json in a copy of the folder"),
    "revision": Elsewhere((), "download that revision and give its folder as model"),
    "tokenizer_revision": Elsewhere((), "download that revision and give its folder as tokenizer"),
    "download_dir": Elsewhere((), "set HF_HOME, or give a folder as model"),
    "hf_token": Elsewhere((), "set HF_TOKEN"),
    "chat_template": Elsewhere((), "the checkpoint's is used; change chat_template.jinja in a copy of the folder"),
    "logits_processors": Elsewhere(([], ()), "give SamplingParams(logits_processors=[...]), which are per request"),
    "structured_outputs_config": Elsewhere(({},), "llguidance is used; see SamplingParams.structured_outputs"),
    "compilation_config": Elsewhere(({},), "use cuda_graph_mode, cuda_graph_bs and the piecewise settings"),
    "profiler_config": Elsewhere(({},), "use profile_dir"),
    "attention_config": Elsewhere(({},), "kernels follow from shapes and the device"),
    "attention_backend": Elsewhere((), "kernels follow from shapes and the device"),
    "kv_cache_memory_bytes": Elsewhere((), "use num_kv_pages, or cpu_cache_gib on the CPU"),
    "block_size": _renamed("page_size"),
    "num_gpu_blocks_override": _renamed("num_kv_pages"),
    "scheduling_policy": _renamed("schedule_policy"),
    "async_scheduling": _renamed("enable_overlap"),
    "cuda_graph_sizes": _renamed("cuda_graph_bs"),
    "cudagraph_capture_sizes": _renamed("cuda_graph_bs"),
    "mm_processor_kwargs": Elsewhere(({},), "change preprocessor_config.json in a copy of the folder"),
    "pooler_config": Elsewhere((), "models generate; no embeddings, scores or classes"),
}


def without_vllms(user: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Remove vLLM's settings that change nothing. Returns the other settings, and warnings.

    Raises:
        ConfigError: a setting of vLLM's asks for something that Weft does not do.
    """
    kept, warnings = dict(user), []
    for name in user.keys() & VLLM_SETTINGS.keys():
        value, setting = kept.pop(name), VLLM_SETTINGS[name]
        if value is None:
            continue
        if setting.harmless == (ANY,):
            warnings += [f"{name} has no effect: {setting.why}"] if value else []
        elif not any(value == one and type(value) is type(one) for one in setting.harmless):
            raise ConfigError(f"{name}={value!r} is a setting of vLLM that Weft does not have: {setting.why}")
    return kept, sorted(warnings)
