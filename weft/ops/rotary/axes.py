"""Rotation by three positions (M-RoPE, arXiv 2409.12191): which position turns which frequency.

Does not know: where positions come from (``runner/mrope.py``).
"""

import torch
from torch import Tensor


def frequency_axes(rotary_dim: int, sections: tuple[int, int, int]) -> Tensor:
    """Return the axis of each column of the rotary table, ``[rotary_dim]`` int64.

    Every third frequency is vertical and the next horizontal, up to the size of their sections. The others are
    temporal.
    """
    half = torch.zeros(rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        half[axis : 3 * sections[axis] : 3] = axis
    return half.repeat(2)


def rotary_rows(table: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """Rows for tokens with three positions.

    Args:
        table: ``[rows, rotary_dim]``.
        positions: ``[3, N]`` int64.
        axes: from ``frequency_axes``, on the same device.

    Returns:
        ``[N, rotary_dim]``.
    """
    return table.gather(0, positions.index_select(0, axes).transpose(0, 1))
