"""Methods of vLLM's engines that Weft refuses by name."""

from collections.abc import Mapping
from typing import NoReturn

from weft.errors import NotSupportedError

_POOLING = "this version runs generative models only; use another engine for embeddings and scores"
_RANKS = "workers run steps and no functions of callers; use update_weights or update_weights_from_path for new weights"
NOT_SUPPORTED = {
    "beam_search": "not in this version; use n with a temperature, and choose by cumulative_logprob",
    "classify": _POOLING,
    "embed": _POOLING,
    "encode": _POOLING,
    "reward": _POOLING,
    "score": _POOLING,
    "apply_model": _RANKS,
    "collective_rpc": _RANKS,
    "get_metrics": "use stats(), which has gauges and counters, and RequestOutput.metrics",
    "llm_engine": "use add_request, step, is_finished and abort of this object, or weft.LLMEngine",
    "renderer": "use render_chat(), or give the prompt to generate()",
    "start_profile": "give profile_dir when the engine is made",
    "stop_profile": "give profile_dir when the engine is made",
}
"""Methods of vLLM's ``LLM``, each with the remedy."""

ASYNC_NOT_SUPPORTED = NOT_SUPPORTED | {
    "add_lora": "LoRA is not supported; give a checkpoint with the adapter merged into it",
    "get_metrics": "use `weft serve`, which has /metrics, or RequestOutput.metrics",
    "llm_engine": "use generate, chat and abort of this object",
    "renderer": "give messages to chat(), or the prompt to generate()",
}
"""Methods of vLLM's ``AsyncLLM``, each with the remedy."""


def refuse_method(engine: object, refused: Mapping[str, str], name: str) -> NoReturn:
    """Raise NotSupportedError for a method in ``refused``, and a plain AttributeError for another name."""
    kind = type(engine).__name__
    if name in refused:
        raise NotSupportedError(f"{kind}.{name}: {refused[name]}")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")
