"""What decode kernels of the delta rule leave of a token before its state is read: vectors of float32 numbers.

Job: where they lie, for the kernels that write them and those that read them. Does not know: any kernel.
"""

from __future__ import annotations

from typing import NamedTuple


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
    """Those of ``group`` value heads to a key head."""
    values = 2 * head_k_dim
    gates = values + group * head_v_dim
    decays = gates + group * head_v_dim
    betas = decays + group * channels
    return Vectors(channels, values, gates, decays, betas, (betas + group + 3) // 4 * 4)


class StatesFixed(NamedTuple):
    """What a launch that takes states through tokens is compiled for: tokens of each sequence, heads, vectors."""

    num_tokens: int
    num_k_heads: int
    num_v_heads: int
    vectors: Vectors
