"""Mamba-2 on the GPU, besides the chunked recurrence: its gates, and the decode step in three launches.

Job: ``mamba2_gates`` and ``mamba2_decode``. The heads of a group share B and C, whose convolution states are shifted
once, and the norm is over all channels of a group. Hence the convolution is the first launch, the state update of each
row and head the second, and the norm the third. Does not know: the projections.
"""

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.convolution.decode import causal_conv1d_update_triton
from weft.ops.linear_attention.decode import TimeSteps, linear_attention_step
from weft.ops.mamba import mamba2_decode, mamba2_gates, split_heads
from weft.ops.norm.kernels import gated_group_norm_triton
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_ELEMENTS = 512


@jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    dt, A_log, dt_bias, g, step, num_tokens, stride_dt, low, high,
    H: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens, all heads."""
    enter(EARLY)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    heads = tl.arange(0, BLOCK_H)[None, :]
    mask = (tokens < num_tokens) & (heads < H)
    x = tl.load(dt + tokens * stride_dt + heads, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + heads, mask=heads < H, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + heads, mask=heads < H, other=0.0).to(tl.float32))
    x = tl.minimum(tl.maximum(softplus(x), low), high)
    tl.store(g + tokens * H + heads, -rate * x, mask=mask)
    tl.store(step + tokens * H + heads, x, mask=mask)


@launches(mamba2_gates, invariant={})
def mamba2_gates_triton(dt, A_log, dt_bias, limit) -> tuple[Tensor, Tensor]:
    assert dt.stride(1) == 1 and A_log.is_contiguous() and dt_bias.is_contiguous()
    num_tokens, num_heads = dt.shape
    g, step = (torch.empty(dt.shape, dtype=torch.float32, device=dt.device) for _ in range(2))
    if num_tokens:
        block_h = next_power_of_2(num_heads)
        tokens = max(1, _ELEMENTS // block_h)
        _gates_kernel[(cdiv(num_tokens, tokens),)](
            dt, A_log, dt_bias, g, step, num_tokens, dt.stride(0), *limit,
            H=num_heads, TOKENS=tokens, BLOCK_H=block_h, num_warps=4, **early_launch(dt.device),
        )  # fmt: skip
    return g, step


@launches(mamba2_decode, invariant={})
def mamba2_decode_triton(projected, weights, conv_state, state, state_slots, geometry, *, out) -> Tensor:
    """Triton kernels of ``mamba2_decode``; all arithmetic in float32, rounded between the launches."""
    w = weights
    z, xbc, dt = projected.split([geometry.inner_size, geometry.conv_dim, geometry.num_heads], dim=-1)
    # Most rows of a mixed batch may be padding. Nothing is written there; the norm leaves these rows alone.
    sizes = geometry.conv_dim, geometry.inner_size
    convolved, y = (None, None) if out is None else (projected.new_empty(len(xbc), size) for size in sizes)
    xbc = causal_conv1d_update_triton(xbc, w.conv_weight, w.conv_bias, conv_state, state_slots, out=convolved)
    x, b, c = split_heads(xbc, geometry)
    steps = TimeSteps(dt, w.dt_bias, w.D, geometry.dt_limit)
    y = linear_attention_step(c, b, x, w.A_log, state, state_slots, steps=steps, out=y)
    return gated_group_norm_triton(
        y.flatten(1), z, w.norm_weight, w.eps, geometry.num_groups, norm_before_gate=geometry.norm_before_gate,
        state_slots=state_slots, out=out,
    )  # fmt: skip
