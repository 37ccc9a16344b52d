"""``gdn_gates`` on the GPU, in one launch."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.elementwise import sigmoid, softplus
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2

_ELEMENTS = 512
"""Of a program: as many whole tokens as they hold. At most sizes the launch is the cost."""


@jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    a, b, A_log, dt_bias, g, beta, num_tokens, stride_a, stride_b,
    BETA: tl.constexpr, HV: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens, all heads."""
    enter(EARLY)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    heads = tl.arange(0, BLOCK_H)[None, :]
    mask = (tokens < num_tokens) & (heads < HV)
    x = tl.load(a + tokens * stride_a + heads, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + tokens * stride_b + heads, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + heads, mask=heads < HV, other=0.0).to(tl.float32))
    x += tl.load(dt_bias + heads, mask=heads < HV, other=0.0).to(tl.float32)
    tl.store(g + tokens * HV + heads, -rate * softplus(x), mask=mask)
    tl.store(beta + tokens * HV + heads, sigmoid(y) * BETA, mask=mask)


def gdn_gates_triton(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, negative_eigenvalues: bool = False
) -> tuple[Tensor, Tensor]:
    """``gdn_gates`` of ``weft/ops/gated_delta_rule.py``."""
    assert a.shape == b.shape and a.stride(1) == b.stride(1) == 1, f"a {tuple(a.shape)}, b {tuple(b.shape)}"
    assert A_log.is_contiguous() and dt_bias.is_contiguous()
    num_tokens, num_heads = a.shape
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if num_tokens:
        block_h = next_power_of_2(num_heads)
        tokens = max(1, _ELEMENTS // block_h)
        _gates_kernel[(cdiv(num_tokens, tokens),)](
            a, b, A_log, dt_bias, g, beta, num_tokens, a.stride(0), b.stride(0),
            BETA=2.0 if negative_eigenvalues else 1.0, HV=num_heads, TOKENS=tokens, BLOCK_H=block_h,
            num_warps=4, **early_launch(a.device),
        )  # fmt: skip
    return g, beta
