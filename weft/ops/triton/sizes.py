"""Host arithmetic of launches: grids, block sizes, precision.

Triton's ``cdiv`` and ``next_power_of_2`` are made for compile time. On the host they search their arguments for
compile-time values, which takes 2 us a call and was a quarter of an eager step's host time.
"""

import functools
from typing import Any

import torch
from torch import Tensor

MULTIPROCESSORS = 132
"""Multiprocessors of an H200. With at most this many programs, each has the whole shared memory of a multiprocessor."""


LEAST_SHARED_BYTES = 99 << 10
"""Shared memory of a program on GPUs of capability 8.6, 8.9 and 12.0. All others that Weft knows have more."""


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program may have on a device; the least of all without a GPU."""
    if device.type != "cuda":
        return LEAST_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device has compute capability 9.0, as an H100 and an H200 have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def is_small(device: torch.device) -> bool:
    """Whether a program on a device has no more shared memory than on any GPU."""
    return shared_bytes(device) <= LEAST_SHARED_BYTES


def fitting_stages(stages: int, stage_bytes: int, device: torch.device) -> int:
    """The pipeline stages of which all but one fit in shared memory; at most ``stages``, and at least one."""
    return max(1, min(stages, 1 + shared_bytes(device) // stage_bytes))


def precision(x: Tensor) -> str:
    """Precision of products of x. Float32 operands are split in three tf32 parts, which keeps float32 accuracy."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` (positive)."""
    return 1 << (size - 1).bit_length()
