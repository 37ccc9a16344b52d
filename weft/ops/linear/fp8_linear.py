"""Linear layers with FP8 (e4m3) weights, whose inputs are quantised on the way in.

Job: ``x W^T + b`` of dequantised values with float32 sums. Owns: how inputs and weights are quantised. Does not know:
layers, sharding, checkpoints.

A value is ``e4m3 * scale``. Weights share a scale in blocks of 128 x 128 (``block=128``) or by row (``block=0``).
Inputs share one in groups of ``block`` inputs of a token, by token, or all (``input_scale``): the largest magnitude
over 448, the largest e4m3 value. Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3) for blocks and groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.activation import silu_and_mul
from weft.ops.backend import Backend, with_kernel
from weft.ops.fp8 import E4M3, E4M3_MAX, SMALLEST_AMAX
from weft.ops.traced import traced_op


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


@traced_op()
@with_kernel("weft.ops.linear.fp8")
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    plain_weight: Tensor | None = None,
    *,
    block: int,
    backend: Backend,
) -> Tensor:
    """``x W^T + b`` of dequantised values, summed in float32.

    Args:
        x: ``[..., K]``, contiguous in its last dimension.
        weight: ``[M, K]`` e4m3; no kernel of the step may write it (it is read early on the GPU).
        weight_scale: float32, ``[M / block, K / block]`` (rounded up), or ``[M, 1]`` if ``block`` is 0.
        bias: ``[N]`` or None.
        input_scale: ``[1]`` float32: the scale of all inputs; None: found for each token (and group).
        plain_weight: ``[N - M, K]`` in x's dtype: further rows, which are multiplied with x as it is.
        block: 128, or 0 for scales by row and token.

    Returns:
        ``[..., N]`` in x's dtype. A row's values depend on that row and the number of rows alone.
    """
    values, scales = quantize_inputs_reference(x, input_scale, block=block)
    y = F.linear(dequantize_inputs(values, scales, block=block), dequantize_weight(weight, weight_scale, block=block))
    if plain_weight is not None:
        y = torch.cat([y, F.linear(x.float(), plain_weight.float())], dim=-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


@with_kernel("weft.ops.linear.fp8")
def fp8_linear_parts(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    *,
    block: int,
    backend: Backend,
) -> Tensor:
    """``fp8_linear`` of ``x [T, K]``, whose last sum may be left to ``rms_norm`` (``weft.ops.linear.linear_parts``)."""
    return fp8_linear.reference(x, weight, weight_scale, None, input_scale, block=block)


@traced_op()
@with_kernel("weft.ops.linear.fp8")
def fp8_linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    block: int,
    backend: Backend,
) -> Tensor:
    """``silu(x G^T) * (x U^T)`` with gate and up projections in one FP8 matrix ``[2 * I, K]``, gate rows first.

    Arguments as of ``fp8_linear``. Returns ``[..., I]`` in x's dtype; the reference rounds both projections to that
    dtype first, the kernel for few rows does not.
    """
    return silu_and_mul.reference(fp8_linear.reference(x, weight, weight_scale, bias, input_scale, block=block))
