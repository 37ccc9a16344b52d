"""Kernels of residual streams: a program takes one token, the second kernel one block of its columns.

Job: ``read_streams`` and ``write_streams``. Does not know: layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.streams import read_streams, write_streams
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_COLUMNS = 1024


@triton.jit
def _sinkhorn(matrix, in_n, inside, eps, ITERATIONS: tl.constexpr):
    """The doubly stochastic matrix of the logits ``matrix``; zeros outside, where sums count as one."""
    largest = tl.max(tl.where(inside, matrix, float("-inf")), 1)
    mix = tl.where(inside, tl.exp(matrix - tl.where(in_n, largest, 0.0)[:, None]), 0.0)
    mix = tl.where(inside, mix / tl.where(in_n, tl.sum(mix, 1), 1.0)[:, None] + eps, 0.0)
    mix = mix / tl.where(in_n, tl.sum(mix, 0) + eps, 1.0)[None, :]
    for _ in range(ITERATIONS - 1):
        mix = mix / tl.where(in_n, tl.sum(mix, 1) + eps, 1.0)[:, None]
        mix = mix / tl.where(in_n, tl.sum(mix, 0) + eps, 1.0)[None, :]
    return mix


@jit
def _read_streams_kernel(
    streams, products, scale, base, x, weights, norm_eps, eps, stride_token, stride_stream, stride_products,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, ITERATIONS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token. Its streams are read twice, the second time from a cache."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    in_n = n < COUNT
    rows = streams + token * stride_token + n[:, None] * stride_stream
    squares = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        mask = in_n[:, None] & (columns < WIDTH)[None, :]
        values = tl.load(rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (COUNT * WIDTH) + norm_eps)
    p_products = products + token * stride_products
    logits = tl.load(p_products + n, mask=in_n, other=0.0) * inverse * tl.load(scale)
    pre = 1.0 / (1.0 + tl.exp(-(logits + tl.load(base + n, mask=in_n, other=0.0)))) + eps
    logits = tl.load(p_products + COUNT + n, mask=in_n, other=0.0) * inverse * tl.load(scale + 1)
    post = 2.0 / (1.0 + tl.exp(-(logits + tl.load(base + COUNT + n, mask=in_n, other=0.0))))
    places = 2 * COUNT + n[:, None] * COUNT + n[None, :]
    inside = in_n[:, None] & in_n[None, :]
    matrix = tl.load(p_products + places, mask=inside, other=0.0) * inverse * tl.load(scale + 2)
    mix = _sinkhorn(matrix + tl.load(base + places, mask=inside, other=0.0), in_n, inside, eps, ITERATIONS)
    p_weights = weights + token * (COUNT + COUNT * COUNT)
    tl.store(p_weights + n, post, mask=in_n)
    tl.store(p_weights + places - COUNT, mix, mask=inside)
    for start in range(0, WIDTH, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        in_row = columns < WIDTH
        values = tl.load(rows + columns[None, :], mask=in_n[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        result = tl.sum(values * pre[:, None], 0)
        tl.store(x + token * WIDTH + columns, result.to(x.dtype.element_ty), mask=in_row)


@jit
def _write_streams_kernel(
    streams, output, weights, out, stride_token, stride_stream, stride_output,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of columns of all streams of one token."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = columns < WIDTH
    n = tl.arange(0, BLOCK_N)
    in_n = n < COUNT
    dtype: tl.constexpr = out.dtype.element_ty
    p_weights = weights + token * (COUNT + COUNT * COUNT)
    post = tl.load(p_weights + n, mask=in_n, other=0.0).to(dtype).to(tl.float32)
    added = tl.load(output + token * stride_output + columns, mask=in_row, other=0.0).to(tl.float32)
    result = post[:, None] * added[None, :]
    for m in range(COUNT):
        share = tl.load(p_weights + COUNT + m * COUNT + n, mask=in_n, other=0.0).to(dtype).to(tl.float32)
        stream = tl.load(streams + token * stride_token + m * stride_stream + columns, mask=in_row, other=0.0)
        result += share[:, None] * stream.to(tl.float32)[None, :]
    p_out = out + token * (COUNT * WIDTH) + n[:, None] * WIDTH + columns[None, :]
    tl.store(p_out, result.to(dtype), mask=in_n[:, None] & in_row[None, :])


@launches(read_streams, invariant={})
def read_streams_triton(streams, products, scale, base, *, norm_eps, eps, iterations) -> tuple[Tensor, Tensor]:
    rows, count, width = streams.shape
    assert streams.stride(2) == products.stride(1) == 1 and products.dtype == torch.float32
    x = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    weights = torch.empty(rows, count + count * count, dtype=torch.float32, device=streams.device)
    if rows:
        _read_streams_kernel[(rows,)](
            streams, products, scale, base, x, weights, norm_eps, eps, streams.stride(0), streams.stride(1),
            products.stride(0),
            COUNT=count, WIDTH=width, BLOCK_N=next_power_of_2(count), BLOCK_H=min(_COLUMNS, next_power_of_2(width)),
            ITERATIONS=iterations, num_warps=8, **early_launch(streams.device),
        )  # fmt: skip
    return x, weights


@launches(write_streams, invariant={})
def write_streams_triton(streams, output, weights) -> Tensor:
    rows, count, width = streams.shape
    assert streams.stride(2) == output.stride(1) == 1 and weights.is_contiguous()
    out = torch.empty(rows, count, width, dtype=streams.dtype, device=streams.device)
    block = min(_COLUMNS, next_power_of_2(width))
    if rows:
        _write_streams_kernel[(rows, cdiv(width, block))](
            streams, output, weights, out, streams.stride(0), streams.stride(1), output.stride(0),
            COUNT=count, WIDTH=width, BLOCK_N=next_power_of_2(count), BLOCK_H=block, num_warps=4,
            **early_launch(streams.device),
        )  # fmt: skip
    return out
