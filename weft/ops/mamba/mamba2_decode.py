"""What Mamba-2 does between its two projections besides the chunked recurrence: its gates, and the decode step.

Owns: the order of the merged projection on the reading side, ``z | x | B | C | dt``. Does not know: the projections
themselves, or slots' owners.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from weft.config.mamba2 import Mamba2Config
from weft.ops.backend import Backend, with_kernel
from weft.ops.convolution import causal_conv1d_update_reference
from weft.ops.linear_attention import linear_attention_step_reference
from weft.ops.norm import gated_group_norm
from weft.ops.padding import settle_padding


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


@with_kernel("weft.ops.mamba.mamba2")
def mamba2_gates(
    dt: Tensor, A_log: Tensor, dt_bias: Tensor, limit: tuple[float, float], *, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Log decay ``g = -exp(A_log) * step`` and time step ``softplus(dt + dt_bias)``, kept within ``limit``.

    Args:
        dt: ``[T, H]``; tokens may be strided (a slice of a wider projection).
        A_log, dt_bias: ``[H]``.

    Returns:
        ``(g, step)``, each ``[T, H]`` float32.
    """
    step = F.softplus(dt.float() + dt_bias.float()).clamp(*limit)
    return step * -A_log.float().exp(), step


@with_kernel("weft.ops.mamba.mamba2")
def mamba2_decode(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: Mamba2Config,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of N rows that continue a state; both states advance in place.

    Args:
        projected: ``[N, z | x | B | C | dt]``, of the widths ``geometry.part_sizes``.
        conv_state: ``[num_slots, conv_dim, W - 1]``.
        state: ``[num_slots, H, N, P]``, float32 or bfloat16.
        state_slots: ``[N]`` int32. Rows with slot 0 are padding: their output is zero, whatever they hold; only the
            reserved slot's state may change. Other slots occur once.
        geometry: heads and sizes of this rank's share.
        out: ``[N, H * P]`` to write to; padding rows of it are left as they are.

    Returns:
        ``[N, H * P]`` in projected's dtype, ready for the output projection.
    """
    # The operations that the kernels fuse, one after the other.
    w = weights
    z, xbc, dt = projected.split([geometry.inner_size, geometry.conv_dim, geometry.num_heads], dim=-1)
    g, step = mamba2_gates.reference(dt, w.A_log, w.dt_bias, geometry.dt_limit)
    xbc = causal_conv1d_update_reference(xbc, w.conv_weight, conv_state, state_slots, bias=w.conv_bias)
    x, b, c = split_heads(xbc, geometry)
    y = linear_attention_step_reference(c, b, x, g, step, w.D, state, state_slots).flatten(1)
    y = gated_group_norm.reference(
        y, z, w.norm_weight, w.eps, geometry.num_groups, norm_before_gate=geometry.norm_before_gate
    )
    return settle_padding(y, state_slots, out)
