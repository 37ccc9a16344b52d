"""Positions of tokens in a prompt with images (M-RoPE, arXiv 2409.12191).

Text moves all three positions by one. An image stands at one temporal position and spreads over rows and columns; what
follows it goes on after the longer side. So tokens after an image have positions that are smaller than their places
in the sequence, by a difference that stays the same for all that is generated.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mrope_positions(
    num_tokens: int, runs: Sequence[tuple[int, int, int, int]], merge: int
) -> tuple[NDArray[np.int64], int]:
    """Positions of a prompt.

    Args:
        runs: ``(position, tokens, height, width)`` of each run of placeholders, in patches, ascending.
        merge: side of the squares of patches that become one token.

    Returns:
        ``[3, num_tokens]`` temporal, vertical and horizontal positions; and what is added to the place of any later
        token for its position on every axis (0 or negative).
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = current = 0
    for offset, length, height, width in runs:
        rows, columns = height // merge, width // merge
        text = offset - done
        positions[:, done:offset] = current + np.arange(text)
        current += text
        frames = length // (rows * columns)
        positions[:, offset : offset + length] = current + np.indices((frames, rows, columns)).reshape(3, -1)
        current += max(rows, columns)
        done = offset + length
    positions[:, done:] = current + np.arange(num_tokens - done)
    return positions, current - done
