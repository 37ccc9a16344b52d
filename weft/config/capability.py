"""Number formats that a GPU lacks: FP8 (e4m3) before compute capability 8.9.

Job: refuse FP8 weights and an FP8 KV cache there, where Triton converts no e4m3. Does not know: kernels.
"""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelConfig
from weft.errors import ConfigError

_LEAST_FP8 = (8, 9)


def has_fp8(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability converts and multiplies e4m3."""
    return capability >= _LEAST_FP8


def check_fp8(values: dict[str, Any], model: ModelConfig) -> None:
    """Refuse FP8 weights and caches on a GPU without e4m3.

    Raises:
        ConfigError: names the setting, the GPU's capability and what to use instead.
    """
    weights = model.quantization is not None and any(scheme.form == "fp8" for scheme in model.quantization.schemes)
    cache = values["kv_cache_dtype"] == "fp8"
    if values["device"] != "cuda" or not (weights or cache):
        return
    import torch

    if not torch.cuda.is_available() or has_fp8(capability := torch.cuda.get_device_capability()):
        return
    what, remedy = (
        ("weights in FP8 (e4m3)", "an unquantised checkpoint, with quantization='int4' if it is large")
        if weights
        else ("kv_cache_dtype='fp8'", "kv_cache_dtype='auto'")
    )
    raise ConfigError(
        f"{what}: this GPU has compute capability {'.'.join(map(str, capability))}, and e4m3 needs "
        f"{'.'.join(map(str, _LEAST_FP8))}; use {remedy}"
    )
