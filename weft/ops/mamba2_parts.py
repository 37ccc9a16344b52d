"""What Mamba-2's operations take: its weights between the projections, and the heads of the convolution's output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.config.mamba2 import Mamba2Config


class Mamba2Weights(NamedTuple):
    """One rank's weights between the projections.

    Attributes:
        conv_weight: ``[conv_dim, W]``.
        conv_bias: ``[conv_dim]`` or None.
        A_log, dt_bias, D: ``[H]`` float32.
        norm_weight: ``[H * P]``; None: there is no norm.
        eps: of the norm.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    norm_weight: Tensor | None
    eps: float


def split_heads(xbc: Tensor, geometry: Mamba2Config) -> tuple[Tensor, Tensor, Tensor]:
    """``[N, conv_dim]`` -> ``x [N, H, P]``, ``B, C [N, G, N]``, as views."""
    sizes = [geometry.inner_size, geometry.groups_size, geometry.groups_size]
    x, b, c = xbc.split(sizes, dim=-1)
    shape = (geometry.num_groups, geometry.state_size)
    return x.unflatten(-1, (geometry.num_heads, geometry.head_dim)), b.unflatten(-1, shape), c.unflatten(-1, shape)
