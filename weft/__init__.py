"""Weft: an inference engine for hybrid language models: paged softmax attention and recurrent layers.

Each public name is loaded from its module on first use, so that ``import weft`` takes milliseconds and loads no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config import EngineConfig
    from weft.engine.async_llm import AsyncLLM
    from weft.engine.llm import LLM
    from weft.errors import WeftError
    from weft.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from weft.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "WeftError",
    "__version__",
]

_MODULES = {
    "LLM": "weft.engine.llm",
    "AsyncLLM": "weft.engine.async_llm",
    "CompletionOutput": "weft.outputs",
    "EngineConfig": "weft.config",
    "Logprob": "weft.outputs",
    "RequestMetrics": "weft.outputs",
    "RequestOutput": "weft.outputs",
    "SamplingParams": "weft.sampling_params",
    "StructuredOutputsParams": "weft.sampling_params",
    "WeftError": "weft.errors",
}


class _VllmModules:
    """Asks ``weft.compat`` for modules of vLLM, which is loaded for the first that Weft does not have."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> Any:
        if not name.startswith("weft."):
            return None
        from weft.compat.names import VllmModules

        return VllmModules.find_spec(name)


sys.meta_path.append(_VllmModules)


def find_name(module: str, name: str) -> Any:
    """Return Weft's object of one of vLLM's names, or raise what tells the remedy (``weft.compat.names``)."""
    from weft.compat import names

    return names.find_name(module, name)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        return find_name(__name__, name)
    module = _MODULES[name]
    if module not in sys.modules:
        from weft.processes.collector import collector_off
        from weft.processes.preload import load_torch_libraries

        if name == "LLM":
            load_torch_libraries()

        with collector_off():
            import_module(module)
    return getattr(import_module(module), name)  # waits for a thread that is loading it


def __dir__() -> list[str]:
    return __all__
