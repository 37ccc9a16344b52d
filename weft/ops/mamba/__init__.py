"""The selective scan of Mamba (arXiv 2312.00752), token by token, and the gates and decode step of Mamba-2.

Per channel, with input x, time step dt and the channel's rates A, and B, C of the token::

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t        S: [N]
    y_t = (S_t . C_t + D x_t) silu(z_t)

Job: outputs and states, all arithmetic in float32. Owns: the state layout ``[num_slots, N, C]`` of Mamba, float32 or
bfloat16 (rounded at the store only), and the order of Mamba-2's merged projection on the reading side,
``z | x | B | C | dt``. Does not know: projections, or slots' owners. Mamba-2's chunked recurrence is that of
``weft.ops.linear_attention``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.mamba2 import Mamba2Config
from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.chunks import ChunkWalk
from weft.ops.convolution import causal_conv1d_update_reference
from weft.ops.device_work import device_work
from weft.ops.linear_attention import linear_attention_step_reference
from weft.ops.norm import gated_group_norm
from weft.ops.padding import settle_padding
from weft.ops.rows import by_chunk, by_row


class ScanWeights(NamedTuple):
    """Weights of the selective scan.

    Attributes:
        dt_bias, D: ``[C]``.
        A_log: ``[N, C]``, transposed as the state is.
    """

    dt_bias: Tensor
    A_log: Tensor
    D: Tensor


def heads_of(b: Tensor) -> int:
    """How many heads B, ``[T, N]`` or ``[T, H, N]``, has."""
    return 1 if b.dim() == 2 else b.shape[1]


@with_kernel("weft.ops.mamba.scan", by_row("x", "z", "dt", "b", "c", "state_slots"))
def selective_scan_step(
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    weights: ScanWeights,
    state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one token for each of N rows that continue a state. The state advances in place.

    Args:
        x, z, dt: ``[R, C]``; rows may be strided.
        b, c: ``[R, N]``, or ``[R, H, N]`` if each of H heads of equally many channels has B and C of its own (Zamba).
        state: ``[num_slots, N, C]``.
        state_slots: ``[R]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out [R, C]``.

    Returns:
        ``[R, C]`` in x's dtype.
    """
    slots = state_slots.long()
    new, y = _step(state.index_select(0, slots).float(), x, z, dt, b, c, weights)
    state.index_copy_(0, slots, new.to(state.dtype))
    return settle_padding(y.to(x.dtype), state_slots, out)


def _step(
    old: Tensor, x: Tensor, z: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: ScanWeights
) -> tuple[Tensor, Tensor]:
    """Compute one token of each row from states ``[R, N, C]``: the new states, and ``y [R, C]`` float32."""
    dt_bias, A_log, D = weights
    step, values = F.softplus(dt.float() + dt_bias.float()), x.float()
    decay = (-A_log.float().exp() * step[:, None]).exp()  # [R, N, C]
    if b.dim() == 3:
        b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], 1).transpose(1, 2).float() for part in (b, c))
        new = old * decay + b * (step * values)[:, None]
        y = (c * new).sum(1) + D.float() * values
    else:
        new = old * decay + b.float()[..., None] * (step * values)[:, None]
        y = torch.matmul(c.float()[:, None], new).squeeze(1) + D.float() * values
    return new, y * F.silu(z.float())


@with_kernel("weft.ops.mamba.scan", by_chunk("z", "dt", "b", "c", "x", states=("state",)))
def selective_scan(
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    weights: ScanWeights,
    state: Tensor,
    batch: Batch,
    *,
    backend: Backend,
) -> Tensor:
    """Run the sequences from ``batch.num_decodes`` on through the scan; arguments as in ``selective_scan_step``.

    A sequence starts from the state in its slot of ``batch.state_slots``, or from zero if it begins in this step. The
    final state is written to the same slot, and the state after a chunk to the chunk's ``checkpoint_slot``, if any.

    Returns:
        ``[T, C]`` in x's dtype; rows outside those sequences are zero.
    """
    # The sequences side by side, token by token.
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if batch.mixed is not None:
        given = {"x": x, "z": z, "dt": dt, "b": b, "c": c, **weights._asdict()}
        return device_work(_scan_of_tensors, batch, out, given, {"state": state})
    if batch.num_decodes == batch.num_seqs:
        return out
    walk = ChunkWalk(batch, state)
    for step, live in walk.steps():
        for t in range(int(walk.valid[step].sum(1).max())):
            rows, inside = walk.tokens[step, t], walk.valid[step, t]
            new, y = _step(live, x[rows], z[rows], dt[rows], b[rows], c[rows], weights)
            live.copy_(torch.where(inside[:, None, None], new, live))
            out[rows[inside]] = y[inside].to(out.dtype)
    return out


def _scan_of_tensors(
    x: Tensor, z: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, **weights: Tensor
) -> Tensor:
    """``selective_scan`` as device work, which takes tensors alone."""
    return selective_scan.reference(x, z, dt, b, c, ScanWeights(**weights), state, batch)


class Mamba2Weights(NamedTuple):
    """Weights of one rank between the projections.

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


@with_kernel("weft.ops.mamba.mamba2", by_row("dt"))
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


@with_kernel("weft.ops.mamba.mamba2", by_row("projected", "state_slots"))
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
    """Compute one token for each of N rows that continue a state. Both states advance in place.

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
