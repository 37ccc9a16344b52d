"""Host arithmetic of launches: grids, block sizes, precision.

Triton has ``cdiv`` and ``next_power_of_2``, but made for compile time: called on the host they first look through their
arguments for compile-time values, 2 us a call, which was a quarter of an eager step's host time.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPROCESSORS = 132
"""Of an H200. As many programs have one each, with all its shared memory for their pipeline."""


def precision(x: Tensor) -> str:
    """Of products of x: float32 operands are split in three tf32 parts, which keeps float32 accuracy."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` (positive)."""
    return 1 << (size - 1).bit_length()
