"""Host arithmetic of launches: grids, block sizes, precision.

Triton's ``cdiv`` and ``next_power_of_2`` are made for compile time. On the host they search their arguments for
compile-time values, which takes 2 us a call and was a quarter of an eager step's host time.
"""

import torch
from torch import Tensor

MULTIPROCESSORS = 132
"""Multiprocessors of an H200. With at most this many programs, each has the whole shared memory of a multiprocessor."""


def precision(x: Tensor) -> str:
    """Precision of products of x. Float32 operands are split in three tf32 parts, which keeps float32 accuracy."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` (positive)."""
    return 1 << (size - 1).bit_length()
