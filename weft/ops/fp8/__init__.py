"""FP8 (e4m3): four bits of exponent, three of mantissa, no infinities; and how inputs and weights are quantised.

A value is ``e4m3 * scale``. Weights share a scale in blocks of 128 x 128 (``block=128``) or by row (``block=0``).
Inputs share one in groups of ``block`` inputs of a token, by token, or all (``input_scale``): the largest magnitude
over 448, the largest e4m3 value. Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3) for blocks and groups.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-10
"""Lower bound on the largest magnitude from which a scale is computed, so that zeros have a scale."""


class Fp8Matrix(NamedTuple):
    """A matrix ``[N, K]`` in e4m3 (or one for each expert, ``[E, N, K]``), and how its inputs are quantised.

    Attributes:
        scale: float32, ``[N / block, K / block]`` (rounded up), or ``[N, 1]`` if ``block`` is 0.
        input_scale: ``[1]`` float32, the scale of all inputs. Computed for each token (and group) if None.
        block: rows and columns that share a scale, and inputs of a token; 0: a scale for each row and token.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None
    block: int


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., K] -> (values [..., K] e4m3, scales [..., 1] float32)`` with ``x = values * scales``, a scale per row."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_AMAX) / E4M3_MAX
    return (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def quantize_inputs_reference(x: Tensor, input_scale: Tensor | None, *, block: int) -> tuple[Tensor, Tensor]:
    """Inputs as the products see them.

    Args:
        x: ``[..., K]``.
        input_scale: ``[1]`` float32: the scale of all inputs; what is larger than ``448 * input_scale`` saturates.
        block: inputs of a token that share a scale (the last group may be shorter); 0: all of them.

    Returns:
        Values ``[..., K]`` in e4m3 and scales ``[..., G]`` in float32, one for each of the G groups.
    """
    if input_scale is not None:
        values = (x.float() / input_scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return values, input_scale.expand(*x.shape[:-1], 1)
    if not block:
        return quantize_rows(x)
    columns = x.shape[-1]
    values, scales = quantize_rows(F.pad(x, (0, -columns % block)).unflatten(-1, (-1, block)))
    return values.flatten(-2)[..., :columns], scales.squeeze(-1)


def dequantize_inputs(values: Tensor, scales: Tensor, *, block: int) -> Tensor:
    """``values * scales`` in float32; the inverse of ``quantize_inputs_reference`` up to rounding."""
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(block, dim=-1)[..., : values.shape[-1]]
    return values.float() * scales


def dequantize_weight(weight: Tensor, scale: Tensor, *, block: int) -> Tensor:
    """``[..., N, K]`` in e4m3 times its scales, in float32.

    Args:
        scale: ``[..., N / block, K / block]`` (rounded up), or ``[..., N, 1]`` if ``block`` is 0.
    """
    if block:
        rows, columns = weight.shape[-2:]
        scale = scale.repeat_interleave(block, dim=-2)[..., :rows, :].repeat_interleave(block, dim=-1)[..., :columns]
    return weight.float() * scale
