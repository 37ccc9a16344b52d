"""Attention over earlier blocks on the GPU: one program for each token and query.

Job: ``read_blocks`` in one pass over the states, with an online softmax. Does not know: layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.block_residual import STATE_EPS, read_blocks
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@triton.jit
def _add_state(acc, total, largest, state, query, state_eps, WIDTH: tl.constexpr):
    """One more state of the online softmax."""
    inverse = tl.rsqrt(tl.sum(state * state, 0) / WIDTH + state_eps)
    score = tl.sum(state * query, 0) * inverse
    above = tl.maximum(largest, score)
    kept, weight = tl.exp(largest - above), tl.exp(score - above)
    return acc * kept + state * (weight * inverse), total * kept + weight, above


@jit
def _read_blocks_kernel(
    blocks, latest, queries, weights, out, scale, state_eps, eps, stride_latest,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    enter(EARLY)
    token, i_query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    query = tl.load(queries + i_query * WIDTH + columns, mask=mask, other=0.0) * scale
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    total, largest = 0.0, float("-inf")
    for i in range(COUNT):
        state = tl.load(blocks + (token * COUNT + i) * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        acc, total, largest = _add_state(acc, total, largest, state, query, state_eps, WIDTH)
    state = tl.load(latest + token * stride_latest + columns, mask=mask, other=0.0).to(tl.float32)
    acc, total, largest = _add_state(acc, total, largest, state, query, state_eps, WIDTH)
    acc /= total
    acc *= tl.rsqrt(tl.sum(acc * acc, 0) / WIDTH + eps)
    acc *= tl.load(weights + i_query * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    place = out + (i_query * tl.num_programs(0).to(tl.int64) + token) * WIDTH + columns
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


@launches(read_blocks)
def read_blocks_triton(blocks, latest, queries, weights, eps) -> Tensor:
    rows, count, width = blocks.shape
    assert blocks.is_contiguous() and queries.is_contiguous() and weights.is_contiguous() and latest.stride(1) == 1
    assert queries.dtype == torch.float32 and count > 0
    out = torch.empty(len(queries), rows, width, dtype=weights.dtype, device=latest.device)
    block = next_power_of_2(width)
    if rows:
        _read_blocks_kernel[(rows, len(queries))](
            blocks, latest, queries, weights, out, width**-0.5, STATE_EPS, eps, latest.stride(0),
            COUNT=count, WIDTH=width, BLOCK=block, num_warps=max(1, min(8, block // 256)),
            **early_launch(latest.device),
        )  # fmt: skip
    return out
