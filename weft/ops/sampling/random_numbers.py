"""The counter-based random numbers of ``weft/ops/sampling`` inside a kernel, bit for bit."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """lowbias32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_words(seed, position, tokens):
    """The 32-bit hash of (seed, position, token): uint32, shaped like ``tokens``."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first = _mix(_mix(_mix(low ^ 0x243F6A88) ^ high) ^ place)
    second = _mix(_mix(_mix(low ^ 0x85A308D3) ^ high) ^ place) | 1
    return _mix((_mix(tokens.to(tl.uint32)) ^ first) * second)


@triton.jit
def uniform(words):
    """The uniform number of a word."""
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)


@triton.jit
def exponential(words):
    """``-log1p(-u)`` of the uniform number ``u`` of a word, exact near 0 where the sample is decided."""
    u = uniform(words)
    # -log(1 - u) = u + u^2 / 2 + u^3 / 3 ...; beyond a quarter, log has no trouble. Cut off below 1e-8.
    series = 1.0 / 12.0
    for term in tl.static_range(11):
        series = series * u + 1.0 / (11 - term)
    return tl.where(u <= 0.25, u * series, -tl.log(1.0 - u))
