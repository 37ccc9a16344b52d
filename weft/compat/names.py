"""vLLM's public names and modules: where Weft has the same thing, and what to use instead of the rest.

``weft`` asks ``find_name`` for names that it does not define itself. ``VllmModules`` finds modules such as
``weft.v1.engine.async_llm``, which exist for their names alone. Nothing else of Weft imports this room.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_POOLING = "models generate; use another engine for embeddings, scores and classes"
_LORA = "LoRA is not supported; merge the adapter into the checkpoint"
_MODELS = "an architecture is added in Weft's source; see docs/adding-a-model.md"
_METRICS = "use LLM.stats() and RequestOutput.metrics"
_SETTINGS = "give settings as keywords of LLM or EngineArgs; `weft config` lists them"

NAMES = {
    "AsyncEngineArgs": "weft.compat.engine_args",
    "AsyncLLM": "weft.engine.async_llm",
    "AsyncLLMEngine": "weft.compat.llm_engine",
    "CompletionOutput": "weft.outputs",
    "EngineArgs": "weft.compat.engine_args",
    "FlexibleArgumentParser": "weft.compat.engine_args",
    "LLM": "weft.engine.llm",
    "LLMEngine": "weft.compat.llm_engine",
    "PromptType": "weft.compat.prompts",
    "RequestOutput": "weft.outputs",
    "RequestOutputKind": "weft.sampling_params",
    "SamplingParams": "weft.sampling_params",
    "StructuredOutputsParams": "weft.sampling_params",
    "TextPrompt": "weft.compat.prompts",
    "TokensPrompt": "weft.compat.prompts",
}
"""vLLM's names of what Weft has, each with its module."""

REFUSED = {
    "BeamSearchParams": "use n with a temperature, and choose by cumulative_logprob",
    "ClassificationOutput": _POOLING,
    "ClassificationRequestOutput": _POOLING,
    "CompilationConfig": "use cuda_graph_mode, cuda_graph_bs and the piecewise settings",
    "EmbeddingOutput": _POOLING,
    "EmbeddingRequestOutput": _POOLING,
    "EmbedsPrompt": "give the prompt as text or token ids",
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "KVTransferConfig": "one engine computes the whole request; use data_parallel_size of `weft serve`",
    "LoRARequest": _LORA,
    "ModelRegistry": _MODELS,
    "PoolingOutput": _POOLING,
    "PoolingParams": _POOLING,
    "PoolingRequestOutput": _POOLING,
    "ScoringOutput": _POOLING,
    "ScoringRequestOutput": _POOLING,
    "cleanup_dist_env_and_memory": "call LLM.shutdown(), which frees memory and ends all processes",
    "initialize_ray_cluster": "use `weft serve --distributed-executor-backend ray`",
}
"""vLLM's names of what Weft lacks, each with the remedy."""

MODULES = frozenset(
    {
        "weft.engine.arg_utils", "weft.engine.async_llm_engine", "weft.engine.llm_engine", "weft.entrypoints",
        "weft.entrypoints.llm", "weft.inputs", "weft.inputs.data", "weft.utils", "weft.utils.argparse_utils", "weft.v1",
        "weft.v1.engine", "weft.v1.engine.async_llm", "weft.v1.engine.llm_engine",
    }
)  # fmt: skip
"""Modules of vLLM that have some of ``NAMES``. Each of them finds all."""

REFUSED_MODULES = {
    "weft.assets.": "open pictures with PIL, or name a file or URL in a message",
    "weft.benchmarks": "use `weft bench`",
    "weft.distributed": REFUSED["cleanup_dist_env_and_memory"],
    "weft.envs": _SETTINGS,
    "weft.lora": _LORA,
    "weft.model_executor": _MODELS,
    "weft.multimodal.": "give images as PIL images; see docs/images.md",
    "weft.platforms.": _SETTINGS,
    "weft.pooling_params": _POOLING,
    "weft.renderers": "use LLM.render_chat(), or give the prompt to generate()",
    "weft.transformers_utils": "use LLM.get_tokenizer()",
    "weft.v1.metrics": _METRICS,
    "weft.v1.sample": "use SamplingParams(logits_processors=[...]), which are callables per request",
}
"""Beginnings of module names of vLLM that Weft lacks, each with the remedy."""


def find_name(module: str, name: str) -> Any:
    """Return Weft's object of one of vLLM's names.

    Raises:
        ImportError: Weft lacks it. Unlike an AttributeError, the message reaches ``from weft import …``.
        AttributeError: the name is not vLLM's, as far as this table knows.
    """
    if name in NAMES:
        return getattr(import_module(NAMES[name]), name)
    if name in REFUSED:
        raise ImportError(f"{name} is vLLM's, and Weft does not have it: {REFUSED[name]}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class VllmModules(Loader):
    """An importer of modules that vLLM has and Weft has not. It is asked last, so it hides no module of Weft."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in MODULES:
            return ModuleSpec(name, VllmModules(), is_package=True)
        remedy = next((why for start, why in REFUSED_MODULES.items() if f"{name}.".startswith(start)), None)
        if remedy is not None:
            raise ModuleNotFoundError(f"{name} is a module of vLLM that Weft does not have: {remedy}", name=name)
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.__getattr__ = lambda name: find_name(module.__name__, name)  # type: ignore[method-assign]
