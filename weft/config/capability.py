"""Number formats that a GPU lacks: FP8 (e4m3) before compute capability 8.9, and an FP8 KV cache on 10.x.

Job: refuse them there. Triton converts no e4m3 on the first, and does not compile the prefill over such a cache on the
second: its pipeline cannot hold the assembly that widens values. Does not know: kernels.
"""

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

    if not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    here = f"this GPU has compute capability {'.'.join(map(str, capability))}"
    if weights and not has_fp8(capability):
        raise ConfigError(
            f"weights in FP8 (e4m3): {here}, and e4m3 needs 8.9; use an unquantised checkpoint, with "
            "quantization='int4' if it is large"
        )
    if cache and (not has_fp8(capability) or capability[0] == 10):
        raise ConfigError(
            f"kv_cache_dtype='fp8': {here}, and its kernels run on 8.9, 9.0 and 12.0; use kv_cache_dtype='auto'"
        )
