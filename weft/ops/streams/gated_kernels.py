"""Kernels of gated residual streams: a program takes one stream of one token, or one block of a token's columns.

Job: the operations of ``gated.py``. Does not know: layers.
"""

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.streams.gated import add_to_streams, mean_of_gated, norm_streams, silu_of_mean
from weft.ops.triton.early_launch import early_launch, enter, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_COLUMNS = 1024


@jit
def _norm_streams_kernel(
    streams, weight, out, eps, stride_token, stride_stream,
    WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One stream of one token."""
    release(EARLY)
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    scale = tl.load(weight + n * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    wait(EARLY)
    row = streams + token * stride_token + n * stride_stream
    values = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    p_out = out + (token * tl.num_programs(1) + n) * WIDTH + columns
    tl.store(p_out, (values * inverse * scale).to(out.dtype.element_ty), mask=mask)


@jit
def _silu_of_mean_kernel(
    x, out, factor, stride_x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One token."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    values = tl.load(x + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out + token * WIDTH + columns, (values * sigmoid(values)).to(out.dtype.element_ty), mask=mask)


@jit
def _mean_of_gated_kernel(
    streams, gates, out, stride_gates,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of columns of one token."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for n in tl.static_range(COUNT):
        values = tl.load(streams + (token * COUNT + n) * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gates + token * stride_gates + n * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        total += values * sigmoid(gate)
    tl.store(out + token * WIDTH + columns, (total / COUNT).to(out.dtype.element_ty), mask=mask)


@jit
def _add_to_streams_kernel(
    streams, output, logits, out, stride_token, stride_stream, stride_output, stride_logits,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of columns of all streams of one token."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    added = 2.0 * tl.load(output + token * stride_output + columns, mask=mask, other=0.0).to(tl.float32)
    for n in tl.static_range(COUNT):
        share = sigmoid(tl.load(logits + token * stride_logits + n).to(tl.float32) / COUNT)
        p_stream = streams + token * stride_token + n * stride_stream + columns
        values = tl.load(p_stream, mask=mask, other=0.0).to(tl.float32) + share * added
        tl.store(out + (token * COUNT + n) * WIDTH + columns, values.to(out.dtype.element_ty), mask=mask)


@launches(norm_streams, invariant={})
def norm_streams_triton(streams, weight, eps, *, zero_centered) -> Tensor:
    rows, count, width = streams.shape
    assert streams.stride(2) == 1 and weight.is_contiguous()
    out = torch.empty(rows, count, width, dtype=streams.dtype, device=streams.device)
    block = next_power_of_2(width)
    if rows:
        _norm_streams_kernel[(rows, count)](
            streams, weight, out, eps, streams.stride(0), streams.stride(1),
            WIDTH=width, ZERO_CENTERED=zero_centered, BLOCK=block, num_warps=max(1, min(8, block // 256)),
            **early_launch(streams.device),
        )  # fmt: skip
    return out


@launches(silu_of_mean, invariant={})
def silu_of_mean_triton(x, width, count) -> Tensor:
    assert x.stride(1) == 1
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _silu_of_mean_kernel[(x.shape[0],)](
            x, out, 1.0 / count, x.stride(0),
            WIDTH=width, BLOCK=next_power_of_2(width), num_warps=4, **early_launch(x.device),
        )  # fmt: skip
    return out


@launches(mean_of_gated, invariant={})
def mean_of_gated_triton(streams, gates) -> Tensor:
    rows, count, width = streams.shape
    assert streams.is_contiguous() and gates.stride(1) == 1
    out = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    block = min(_COLUMNS, next_power_of_2(width))
    if rows:
        _mean_of_gated_kernel[(rows, cdiv(width, block))](
            streams, gates, out, gates.stride(0),
            COUNT=count, WIDTH=width, BLOCK=block, num_warps=4, **early_launch(streams.device),
        )  # fmt: skip
    return out


@launches(add_to_streams, invariant={})
def add_to_streams_triton(streams, output, logits) -> Tensor:
    rows, count, width = streams.shape
    assert streams.stride(2) == output.stride(1) == logits.stride(1) == 1
    out = torch.empty(rows, count, width, dtype=streams.dtype, device=streams.device)
    block = min(_COLUMNS, next_power_of_2(width))
    if rows:
        _add_to_streams_kernel[(rows, cdiv(width, block))](
            streams, output, logits, out, streams.stride(0), streams.stride(1), output.stride(0), logits.stride(0),
            COUNT=count, WIDTH=width, BLOCK=block, num_warps=4, **early_launch(streams.device),
        )  # fmt: skip
    return out
