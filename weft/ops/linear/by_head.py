"""Products of heads with matrices of their own, whose rows have the same bits for any number of rows.

Job: ``head_linear`` on the GPU for ``--deterministic``. Owns: its tile. Does not know: layers.
"""

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.linear import head_linear
from weft.ops.triton.early_launch import early_launch, enter
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2, precision

_COLUMNS, _INNER, _FEW, _MANY = 64, 64, 16, 64
"""Output columns and inner elements of a tile, and tokens with few tokens and with many. A tile of any size adds a
row's products in the same order (``invariant.py``)."""


@jit(do_not_specialize=["num_tokens"])
def _head_kernel(
    x, weight, out, num_tokens, stride_token, stride_head, stride_of_head, stride_k, stride_n,
    K: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some output columns of some tokens and one head."""
    enter(EARLY)
    head = tl.program_id(2)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, inside = (tokens < num_tokens)[:, None], (columns < N)[None, :]
    p_x = x + tokens[:, None] * stride_token + head * stride_head
    p_weight = weight + head.to(tl.int64) * stride_of_head + columns[None, :] * stride_n
    acc = tl.zeros([TOKENS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, K, INNER):
        k = start + tl.arange(0, INNER)
        a = tl.load(p_x + k[None, :], mask=is_token & (k < K)[None, :], other=0.0)
        b = tl.load(p_weight + k[:, None] * stride_k, mask=inside & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    p_out = out + (tokens[:, None] * HEADS + head) * N + columns[None, :]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=is_token & inside)


@launches(head_linear, invariant={})
def head_linear_triton(x, weight) -> Tensor:
    (num_tokens, heads, inner), width = x.shape, weight.shape[2]
    assert x.stride(2) == 1, "a head's inner elements are dense"
    out = torch.empty(num_tokens, heads, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        tokens = _FEW if num_tokens <= _FEW else _MANY
        columns, step = (
            min(most, max(16, next_power_of_2(size))) for most, size in ((_COLUMNS, width), (_INNER, inner))
        )
        _head_kernel[(cdiv(num_tokens, tokens), cdiv(width, columns), heads)](
            x, weight, out, num_tokens, x.stride(0), x.stride(1), *weight.stride(),
            K=inner, N=width, HEADS=heads, TOKENS=tokens, COLUMNS=columns, INNER=step,
            PRECISION=precision(x), num_warps=4, **early_launch(x.device),
        )  # fmt: skip
    return out
