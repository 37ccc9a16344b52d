"""The fingerprint of an engine: everything that decides what the bytes of a page or a state mean."""

import json
import platform
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import torch
import triton

from weft import __version__
from weft.cache.spec import CacheSpec
from weft.config import EngineConfig

SAMPLE_BYTES = 1 << 16
"""Bytes at the begin and the end of each file of weights that are hashed."""


def fingerprint_of(config: EngineConfig, spec: CacheSpec) -> str:
    """The fingerprint as hexadecimal digits. Weights count by their files' names, sizes and samples, since hashing
    all of them would take longer than loading them."""
    digest = blake2b(digest_size=16)
    settings = {
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "mamba_ssm_dtype": config.mamba_ssm_dtype,
        "quantization": config.quantization,
        "page_size": config.page_size,
        "max_model_len": config.max_model_len,
        "load_format": config.load_format,
        "seed": config.seed if config.load_format == "dummy" else None,
        "drafts": str(config.speculative_config),
        "device": config.device,
        "deterministic": _origin_of_bits() if config.deterministic else None,
        "layers": {name: asdict(layer) for name, layer in spec.layers.items()},
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for path in sorted(Path(config.model_path).glob("*")):
        if path.suffix in (".json", ".safetensors") and path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(_sample(path))
    return digest.hexdigest()


def _origin_of_bits() -> list[str]:
    """Return versions and the kind of device. The bits of a request may depend on them besides the model."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return [__version__, torch.__version__, triton.__version__, device]


def _sample(path: Path) -> bytes:
    with path.open("rb") as file:
        begin = file.read(SAMPLE_BYTES)
        file.seek(max(SAMPLE_BYTES, path.stat().st_size - SAMPLE_BYTES))
        return begin + file.read(SAMPLE_BYTES)
