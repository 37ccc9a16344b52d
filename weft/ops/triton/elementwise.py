"""Functions that several kernels apply element by element, of float32 values in few instructions."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``, relative error below 1e-6 where the result is a normal number, else 0.

    Half the instructions of ``tl.sigmoid``: the base-2 exponential and the reciprocal root are one each, while the
    natural exponential and a division also treat denormal numbers, which cannot matter next to 1.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, accurate for very negative x too (W. Kahan's correction of log near 1)."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    exact = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def kda_log_decay(rate, x, FLOOR: tl.constexpr):
    """Log decay of Kimi Delta Attention; ``FLOOR`` is its lower bound, or 0 if it has none. See ``kda_gates``."""
    if FLOOR < 0:
        return FLOOR * sigmoid(rate * x)
    return -rate * softplus(x)
