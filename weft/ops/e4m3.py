"""The FP8 format: four bits of exponent, three of mantissa, no infinities."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-10
"""Magnitudes below count as this, so that zeros have a scale."""
