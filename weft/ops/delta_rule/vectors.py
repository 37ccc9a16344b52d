"""Intermediate values that one kernel of the delta rule writes and another reads.

Job: their layout: vectors of a decoded token, and the prepared chunks of a prefill. Does not know: any kernel.
"""

from typing import NamedTuple

from torch import Tensor


class PreparedChunks(NamedTuple):
    """Everything the state pass needs of the chunks besides queries, keys and values.

    Attributes:
        solve, attention: ``[chunks, HV, 64, 64]`` in q's dtype: ``(I + A)^-1 - I``, and P below its diagonal.
        vectors: float32. Without ``keys`` ``[chunks, HV, 8, 64]``: scales of keys and of queries with the decay from
            the chunk's start, and of keys with the decay to the chunk's end. Then decay of the whole chunk (from its
            first token), write strength, effect of a token on itself, two unused. With ``keys`` ``[chunks, HV, 64 + 64
            + K]``: write strength, effect of a token on itself, and the decay of the whole chunk for each channel.
        keys: with decays per channel, ``[chunks, HV, 3, 64, K]``: keys with their decays from the chunk's start,
            queries with the same, keys with the decay to the chunk's end. The state pass then reads no q and k.
    """

    solve: Tensor
    attention: Tensor
    vectors: Tensor
    keys: Tensor | None = None


class Vectors(NamedTuple):
    """The vectors of one token and key head: the query, the key behind it, and more for each value head of the group.

    Attributes:
        channels: numbers of a decay: 1, or one for each number of the key.
        values, gates: where the values begin, one head's behind another's, and where the output's gates.
        decays, betas: where the decays of the state begin, and where the write strengths.
        size: of all, in whole 16 bytes.
    """

    channels: int
    values: int
    gates: int
    decays: int
    betas: int
    size: int


def vectors_of(group: int, head_k_dim: int, head_v_dim: int, channels: int = 1) -> Vectors:
    """Lay out the vectors of a key head with ``group`` value heads."""
    values = 2 * head_k_dim
    gates = values + group * head_v_dim
    decays = gates + group * head_v_dim
    betas = decays + group * channels
    return Vectors(channels, values, gates, decays, betas, (betas + group + 3) // 4 * 4)


class StatesFixed(NamedTuple):
    """Compile-time parameters of a launch that takes states through tokens: tokens of each sequence, heads, vectors."""

    num_tokens: int
    num_k_heads: int
    num_v_heads: int
    vectors: Vectors
