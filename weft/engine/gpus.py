"""Assignment of GPUs to replicas, without torch."""

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import ConfigError


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, named as in ``CUDA_VISIBLE_DEVICES``."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [str(index) for index in range(count.value)]


def devices_of_replica(settings: Mapping[str, Any]) -> Callable[[int], dict[str, str]]:
    """Return a function from a replica's number to its environment. On the CPU there is nothing to assign.

    Raises:
        ConfigError: there are too few GPUs.
    """
    gpus = [] if settings.get("device") == "cpu" else visible_gpus()
    if not gpus:
        return lambda index: {}
    size, count = settings.get("tensor_parallel_size") or 1, settings["data_parallel_size"]
    if size * count > len(gpus):
        raise ConfigError(
            f"data_parallel_size={count} with tensor_parallel_size={size} needs {size * count} GPUs, there are "
            f"{len(gpus)}; lower one of them"
        )
    return lambda index: {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * size : (index + 1) * size])}
