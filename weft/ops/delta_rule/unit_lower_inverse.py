"""The inverse of ``I + A`` for a strictly lower triangular A of 64 rows, inside a kernel.

It doubles the size of inverted diagonal blocks, D, until one is left: with L the part of A below them,
``(D^-1 + L)^-1 = D - D L D`` for each pair of blocks. It is as accurate as substitution (a Neumann series is not when
keys repeat). Up to 16 rows the blocks stand beside one another in a batch of small products, a warp for each; the rest
are products of whole matrices. The inverses of the chunked delta rule are at most 1 in magnitude, so float16 operands
serve bfloat16 inputs better than bfloat16.
"""

import triton
import triton.language as tl

_SMALL = tl.constexpr(16)


@triton.jit
def _join(inverse, below, i, j, level, PRECISION: tl.constexpr):
    """Inverted blocks of twice ``2 ** level`` rows; ``inverse`` is zero beside its blocks."""
    operand = inverse.to(below.dtype)
    product = tl.dot(operand, below, input_precision=PRECISION).to(below.dtype)
    product = tl.dot(product, operand, input_precision=PRECISION)
    joined = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
    return tl.where(joined, -product, inverse)


@triton.jit
def unit_lower_inverse(below, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + below)^-1 [SIZE, SIZE]`` in float32, of a power of two from 16 to 64.

    Args:
        below: in the dtype of the products' operands, zero on the diagonal and above.
    """
    BLOCKS: tl.constexpr = SIZE // _SMALL
    own = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    blocks = tl.reshape(below, [BLOCKS, _SMALL, BLOCKS, _SMALL]).to(tl.float32)
    near = tl.sum(tl.where(own, blocks, 0.0), 2)
    i, j = tl.arange(0, _SMALL)[None, :, None], tl.arange(0, _SMALL)[None, None, :]
    small = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, near, 0.0)
    near = near.to(below.dtype)
    for level in tl.static_range(1, 4):
        small = _join(small, near, i, j, level, PRECISION)
    inverse = tl.reshape(tl.where(own, small[:, :, None, :], 0.0), [SIZE, SIZE])
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    for level in tl.static_range(4, 6):
        if (1 << level) < SIZE:
            inverse = _join(inverse, below, i, j, level, PRECISION)
    return inverse
