"""Matrix products with weights: linear layers, and the gated one of the MLPs (SwiGLU, arXiv 2002.05202).

Job: ``x W^T + b``, and ``silu(gate) * up`` of a merged projection, with weights in the inputs' dtype, in FP8 (e4m3) as
``weft.ops.fp8`` defines it, or coded as ``weft.ops.codes`` does. Does not know: sharding, layers, checkpoints.

The torch backend calls the matrix library in the open, where tracers and the replay emulator see it. The Triton backend
decides by the number of rows, on the host and from the shape alone, so it can be captured; a tracer sees one operation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.activation import silu_and_mul
from weft.ops.backend import Backend, with_kernel
from weft.ops.codes import CodedMatrix, dequantize_codes
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.fp8 import dequantize_inputs, dequantize_weight, quantize_inputs_reference
from weft.ops.rows import by_row
from weft.ops.traced import traced_op


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@traced_op(linear_reference)
def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` by a kernel for few rows, by the matrix library for many."""
    from weft.ops.linear.skinny import linear_triton

    return linear_triton(x, weight, bias)


@traced_op(linear_reference)
def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` whose rows have the same bits for any number of rows."""
    from weft.ops.linear.invariant import invariant_linear_triton

    return invariant_linear_triton(x, weight, bias)


def _rows_alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` of every row by itself."""
    return by_row("x")(linear_reference, x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend) -> Tensor:
    """``x W^T + b``, accumulated in float32.

    Args:
        x: ``[..., K]``, contiguous in its last dimension.
        weight: ``[N, K]`` in x's dtype; no kernel of the step may write it (it is read early on the GPU).
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in x's dtype. A row's values depend on that row and the number of rows alone.
    """
    match backend:
        case Backend.TORCH:
            return linear_reference(x, weight, bias)
        case Backend.TRITON:
            return skinny_linear(x, weight, bias)
        case Backend.INVARIANT_TORCH:
            return _rows_alone(x, weight, bias)
        case Backend.INVARIANT_TRITON:
            return invariant_linear(x, weight, bias)


@with_kernel("weft.ops.linear.skinny")
def linear_parts(x: Tensor, weight: Tensor, peers: PeerBuffers | None = None, *, backend: Backend) -> Tensor | SentRows:
    """``linear`` without a bias, whose last sum may be left to ``rms_norm`` or ``all_reduce_rms_norm``.

    Args:
        x: ``[T, K]``, contiguous in its last dimension.
        weight: as for ``linear``.
        peers: where the ranks have parts of a sum that ``all_reduce_rms_norm`` forms next, to send them there.

    Returns:
        ``[T, N]`` in x's dtype; or ``[S, T, N]`` float32, partial sums that those add in order, where the product is
        split. They add up to the same bits. With ``peers`` also rows that are on their way.
    """
    return linear_reference(x, weight)


@with_kernel("weft.ops.linear.invariant", by_row("x"))
def invariant_linear_parts(x: Tensor, weight: Tensor, *, backend: Backend) -> Tensor:
    """``linear_parts`` without peers, whose rows have the same bits for any number of rows."""
    return linear_reference(x, weight)


@with_kernel("weft.ops.linear.by_head", by_row("x"))
def head_linear(x: Tensor, weight: Tensor, *, backend: Backend) -> Tensor:
    """Each head's product with its own matrix: ``x [T, H, K]``, ``weight [H, K, N]`` -> ``[T, H, N]``.

    The matrix library serves every backend but ``INVARIANT_TRITON``.
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def linear_silu_mul_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return silu_and_mul.reference(F.linear(x, weight, bias))


@traced_op(linear_silu_mul_reference)
def skinny_linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear_silu_mul`` in one kernel for few rows, in two for many."""
    from weft.ops.linear.skinny import linear_silu_mul_triton

    return linear_silu_mul_triton(x, weight, bias)


@traced_op(linear_silu_mul_reference)
def invariant_linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear_silu_mul`` whose rows have the same bits for any number of rows."""
    from weft.ops.linear.invariant import invariant_linear_triton

    return invariant_linear_triton(x, weight, bias, gated=True)


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend) -> Tensor:
    """``silu(x G^T) * (x U^T)`` with the gate and up projections in one matrix.

    Args:
        x: ``[..., K]``, contiguous in its last dimension.
        weight: ``[2 * I, K]``: the rows of the gate, then those of the up projection.
        bias: ``[2 * I]`` or None.

    Returns:
        ``[..., I]`` in x's dtype; the reference rounds both projections to that dtype first, the kernel does not.
    """
    match backend:
        case Backend.TORCH:
            return linear_silu_mul_reference(x, weight, bias)
        case Backend.TRITON:
            return skinny_linear_silu_mul(x, weight, bias)
        case Backend.INVARIANT_TORCH:
            return silu_and_mul(_rows_alone(x, weight, bias), backend=backend)
        case Backend.INVARIANT_TRITON:
            return invariant_linear_silu_mul(x, weight, bias)


def _fp8_product(
    x: Tensor, wide: Tensor, bias: Tensor | None, input_scale: Tensor | None, plain_weight: Tensor | None, block: int
) -> Tensor:
    """``fp8_linear`` with a weight that is dequantised."""
    values, scales = quantize_inputs_reference(x, input_scale, block=block)
    y = F.linear(dequantize_inputs(values, scales, block=block), wide)
    if plain_weight is not None:
        y = torch.cat([y, F.linear(x.float(), plain_weight.float())], dim=-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def _fp8_rows(
    _: Any, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, input_scale: Tensor | None,
    plain_weight: Tensor | None, *, block: int,
) -> Tensor:  # fmt: skip
    """``fp8_linear`` of every row by itself. The weight is dequantised once."""
    wide = dequantize_weight(weight, weight_scale, block=block)
    return by_row("x")(_fp8_product, x, wide, bias, input_scale, plain_weight, block)


@traced_op()
@with_kernel("weft.ops.linear.fp8", _fp8_rows)
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
        input_scale: ``[1]`` float32, the scale of all inputs. Computed for each token (and group) if None.
        plain_weight: ``[N - M, K]`` in x's dtype: further rows, which are multiplied with x as it is.
        block: 128, or 0 for scales by row and token.

    Returns:
        ``[..., N]`` in x's dtype. A row's values depend on that row and the number of rows alone.
    """
    wide = dequantize_weight(weight, weight_scale, block=block)
    return _fp8_product(x, wide, bias, input_scale, plain_weight, block)


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


def _coded_rows(x: Tensor, matrix: CodedMatrix, _bias: Tensor | None = None, plain: Tensor | None = None) -> Tensor:
    """An empty result of ``coded_linear``."""
    rows = matrix.words.shape[1] + (0 if plain is None else plain.shape[0])
    return x.new_empty((*x.shape[:-1], rows))


@traced_op(fake=_coded_rows)
@with_kernel("weft.ops.linear.coded")
def coded_linear(
    x: Tensor, matrix: CodedMatrix, bias: Tensor | None = None, plain_weight: Tensor | None = None, *, backend: Backend
) -> Tensor:
    """``x W^T + b`` with a coded matrix, summed in float32.

    Args:
        x: ``[..., K]``, contiguous in its last dimension.
        matrix: ``[M, K]``; no kernel of the step may write it (it is read early on the GPU).
        bias: ``[N]`` or None.
        plain_weight: ``[N - M, K]`` in x's dtype: further rows.

    Returns:
        ``[..., N]`` in x's dtype. A row's values depend on that row and the number of rows alone. A kernel may round a
        weight to x's dtype before it multiplies; the reference does not.
    """
    y = F.linear(x.float(), dequantize_codes(matrix))
    if plain_weight is not None:
        y = torch.cat([y, F.linear(x.float(), plain_weight.float())], dim=-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


@with_kernel("weft.ops.linear.coded")
def coded_linear_parts(x: Tensor, matrix: CodedMatrix, *, backend: Backend) -> Tensor:
    """``coded_linear`` of ``x [T, K]``, whose last sum may be left to ``rms_norm``, as ``linear_parts``."""
    return coded_linear.reference(x, matrix)


@traced_op(fake=lambda x, matrix, bias=None: x.new_empty((*x.shape[:-1], matrix.words.shape[1] // 2)))
@with_kernel("weft.ops.linear.coded")
def coded_linear_silu_mul(x: Tensor, matrix: CodedMatrix, bias: Tensor | None = None, *, backend: Backend) -> Tensor:
    """``silu(x G^T) * (x U^T)`` with gate and up projections in one coded matrix ``[2 * I, K]``, gate rows first.

    Arguments as of ``coded_linear``. Returns ``[..., I]`` in x's dtype; the reference rounds both projections to that
    dtype first, the kernel for few rows does not.
    """
    return silu_and_mul.reference(coded_linear.reference(x, matrix, bias))
