"""The FP8 format: four bits of exponent, three of mantissa, no infinities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-10
"""Magnitudes below count as this, so that zeros have a scale."""


class Fp8Matrix(NamedTuple):
    """A matrix ``[N, K]`` in e4m3 (or one for each expert, ``[E, N, K]``), and how its inputs are quantised.

    Attributes:
        scale: float32, ``[N / block, K / block]`` (rounded up), or ``[N, 1]`` if ``block`` is 0.
        input_scale: ``[1]`` float32: the scale of all inputs; None: found for each token (and group).
        block: rows and columns that share a scale, and inputs of a token; 0: a scale for each row and token.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None
    block: int
