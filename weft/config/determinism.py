"""Deterministic inference (``deterministic``): its choices of other settings, and its refusals.

Job: decide for which settings a request's bits can be independent of its company. Owns: the list of refusals. Does
not know: how kernels, steps and the cache keep the promise (``docs/determinism.md``).
"""

import os
from collections.abc import Iterator, Mapping, Set
from typing import Any

from weft.config.attention import AttentionConfig
from weft.config.chunks import CHUNK_SIZE
from weft.config.convolutional_attention import ConvolutionalAttentionConfig
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.inkling import OutputConvConfig, RelativeAttentionConfig
from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig
from weft.config.lightning_attention import LightningAttentionConfig
from weft.config.mamba import MambaConfig
from weft.config.mamba2 import Mamba2Config
from weft.config.model import ModelConfig
from weft.config.recurrent_gemma import RgLruConfig
from weft.config.short_conv import ShortConvConfig
from weft.config.sliding_window import SlidingWindowConfig
from weft.config.sum_order import MOST_QUERY_ROWS
from weft.errors import ConfigError

VLLM_VARIABLE = "VLLM_BATCH_INVARIANT"
"""An environment variable of vLLM that asks for the same. ``deterministic`` has precedence."""

_MIXERS = (
    AttentionConfig, GatedDeltaNetConfig, Mamba2Config, MambaConfig, LightningAttentionConfig, ShortConvConfig,
    SlidingWindowConfig, KimiDeltaConfig, LatentAttentionConfig, RgLruConfig, RelativeAttentionConfig, OutputConvConfig,
    ConvolutionalAttentionConfig,
)  # fmt: skip
_COST = (
    "the same bits whatever else runs; slower products, reuse up to multiples of 64 prompt tokens, none of generated "
    "tokens"
)


def choose_determinism(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig, given: Set[str]) -> None:
    """Switch the mode on if the environment asks for it, choose open settings, and refuse impossible ones.

    Raises:
        ConfigError: the bits of a request would depend on its company.
    """
    if "deterministic" not in given and os.environ.get(VLLM_VARIABLE) == "1":
        values["deterministic"] = True
        reasons["deterministic"] = f"{VLLM_VARIABLE}=1"
    if not values["deterministic"]:
        return
    reasons["deterministic"] = f"{reasons.get('deterministic', 'given')}: {_COST}"
    if values["mamba_ssm_dtype"] == "bfloat16" and "mamba_ssm_dtype" not in given:
        values["mamba_ssm_dtype"] = "float32"
        reasons["mamba_ssm_dtype"] = "deterministic: a step's end must not round the state"
    if "encoder_cuda_graph_patches" not in given and values["encoder_cuda_graph_patches"]:
        values["encoder_cuda_graph_patches"] = ()
        reasons["encoder_cuda_graph_patches"] = "deterministic: an image is encoded alone, without padding"
    problems = [
        *_problems_of_settings(values), *_problems_of_drafts(values, model), *_problems_of_model(values, model)
    ]  # fmt: skip
    if problems:
        raise ConfigError(f"deterministic=True is not possible with {'; nor with '.join(problems)}")


def _problems_of_settings(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield each impossible setting with its reason and the remedy."""
    budget, least = values["max_num_batched_tokens"], values["max_num_seqs"] + CHUNK_SIZE
    if budget < least:
        yield (
            f"max_num_batched_tokens={budget}: a step needs room for {CHUNK_SIZE + 1} tokens of a prompt beside "
            f"max_num_seqs={values['max_num_seqs']} decodes; give {least} or more"
        )
    if values["device"] == "cuda" and values["backend"] == "torch":
        yield "backend='torch' on a GPU: the matrix library chooses by the number of rows; use backend='triton'"
    if values["device"] == "cuda" and values["dtype"] != "bfloat16":
        yield f"dtype={values['dtype']!r} on a GPU: its kernels were measured in bfloat16; use dtype='bfloat16'"
    if values["mamba_ssm_dtype"] == "bfloat16":
        yield "mamba_ssm_dtype='bfloat16': a step's end would round the state; use float32"
    if values["logprobs_mode"] == "processed_logprobs":
        yield "logprobs_mode='processed_logprobs': its sums of top-p may follow the number of rows; use raw_logprobs"
    if values["enable_torch_compile"]:
        yield "enable_torch_compile=True: compiled decodes round elsewhere than other steps; leave it out"
    sources = ("capture",) if values["device"] == "cpu" else ("capture", "eager")
    source = values["piecewise_cuda_graph_compiler"]
    if values["enable_piecewise_cuda_graph"] and source not in sources:
        yield (
            f"piecewise_cuda_graph_compiler={source!r}: such pieces round elsewhere than other steps; "
            f"use {' or '.join(sources)}"
        )


def _problems_of_drafts(values: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    """Yield what keeps a verification from computing the bits of decodes. ``model``: with a head that drafts."""
    config = values["speculative_config"]
    if config is None:
        return
    groups = [heads.num_heads // heads.num_kv_heads for m in _mixers(model) if (heads := _paged_heads(m)) is not None]
    most = min((MOST_QUERY_ROWS // group - 1 for group in groups), default=config.num_speculative_tokens)
    if values["device"] == "cuda" and config.num_speculative_tokens > most:
        yield (
            f"num_speculative_tokens={config.num_speculative_tokens} on a GPU: the attention of so many tokens sums in "
            f"another order; give {most} or fewer"
        )
    if config.synthetic_acceptance_rate is not None:
        yield "synthetic_acceptance_rate: what is drafted becomes part of the text; leave it out"


def _paged_heads(mixer: Any) -> AttentionConfig | None:
    """The heads of attention over pages, whose verification is one tile."""
    if isinstance(mixer, (RelativeAttentionConfig, ConvolutionalAttentionConfig)):
        return mixer.attention if mixer.window is None else None
    return mixer if isinstance(mixer, AttentionConfig) else None


def _mixers(model: ModelConfig) -> list[Any]:
    return [mixer for modules in model.mixers.values() for mixer in modules.values()]


def _problems_of_model(values: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    """Yield each impossible property of the checkpoint with its reason and the remedy."""
    mixers = set(map(type, _mixers(model)))
    others = sorted(mixer.__name__.removesuffix("Config") for mixer in mixers if mixer not in _MIXERS)
    if others:
        yield f"layers of {model.architecture} ({', '.join(others)}): there is no kernel with a fixed order of sums"
    if model.quantization is not None and any(scheme.form != "fp8" for scheme in model.quantization.schemes):
        yield f"{model.quantization.name} weights: their kernels follow the number of rows; use others, or FP8"
    if model.runs_vision and values["encoder_cuda_graph_patches"]:
        yield "encoder_cuda_graph_patches: padding changes the sums of the vision tower; leave it out"
