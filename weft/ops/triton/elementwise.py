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
def softcapped_swiglu(gate, up, gate_cap, up_cap):
    """``cap(gate) * sigmoid(gate) * cap(up)`` with ``cap(y) = c * tanh(y / c)``. The absolute error of tanh is below
    2e-7."""
    capped_gate = gate_cap - 2.0 * gate_cap / (1.0 + tl.exp(2.0 / gate_cap * gate))
    capped_up = up_cap - 2.0 * up_cap / (1.0 + tl.exp(2.0 / up_cap * up))
    return capped_gate / (1.0 + tl.exp(-gate)) * capped_up


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
