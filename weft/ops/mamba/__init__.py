"""The selective scan of Mamba (arXiv 2312.00752), token by token, for prefill and decode.

Per channel, with input x, time step dt and the channel's rates A, and B, C of the token::

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t        S: [N]
    y_t = (S_t . C_t + D x_t) silu(z_t)

Job: outputs and states, all arithmetic in float32. Owns: the state layout ``[num_slots, N, C]``, float32 or bfloat16
(rounded at the store only). Does not know: projections, convolution, norms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.chunks import ChunkWalk
from weft.ops.device_work import device_work
from weft.ops.padding import settle_padding


@with_kernel("weft.ops.mamba.scan")
def selective_scan_step(
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of N rows that continue a state, which advances in place.

    Args:
        x, z, dt: ``[R, C]``; rows may be strided.
        b, c: ``[R, N]``.
        dt_bias, D: ``[C]``. A_log: ``[N, C]``, transposed as the state is.
        state: ``[num_slots, N, C]``.
        state_slots: ``[R]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out [R, C]``.

    Returns:
        ``[R, C]`` in x's dtype.
    """
    slots = state_slots.long()
    new, y = _step(state.index_select(0, slots).float(), x, z, dt, b, c, dt_bias, A_log, D)
    state.index_copy_(0, slots, new.to(state.dtype))
    return settle_padding(y.to(x.dtype), state_slots, out)


def _step(
    old: Tensor, x: Tensor, z: Tensor, dt: Tensor, b: Tensor, c: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row from states ``[R, N, C]``: the new states, and ``y [R, C]`` float32."""
    step, values = F.softplus(dt.float() + dt_bias.float()), x.float()
    decay = (-A_log.float().exp() * step[:, None]).exp()  # [R, N, C]
    new = old * decay + b.float()[..., None] * (step * values)[:, None]
    y = torch.matmul(c.float()[:, None], new).squeeze(1) + D.float() * values
    return new, y * F.silu(z.float())


@with_kernel("weft.ops.mamba.scan")
def selective_scan(
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    batch: Batch,
    *,
    backend: Backend,
) -> Tensor:
    """Run the sequences from ``batch.num_decodes`` on through the scan; arguments as in ``selective_scan_step``.

    The initial state is that of ``batch.state_slots`` (zero for a sequence that starts here); the final state is
    written back there, and the state after every chunk with a ``checkpoint_slot`` into that slot.

    Returns:
        ``[T, C]`` in x's dtype; rows outside those sequences are zero.
    """
    # The sequences side by side, token by token.
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if batch.mixture is not None:
        given = {"x": x, "z": z, "dt": dt, "b": b, "c": c, "dt_bias": dt_bias, "A_log": A_log, "D": D}
        return device_work(selective_scan.reference, batch, out, given, {"state": state})
    if batch.num_decodes == batch.num_seqs:
        return out
    walk = ChunkWalk(batch, state)
    for step, live in walk.steps():
        for t in range(int(walk.valid[step].sum(1).max())):
            rows, inside = walk.tokens[step, t], walk.valid[step, t]
            new, y = _step(live, x[rows], z[rows], dt[rows], b[rows], c[rows], dt_bias, A_log, D)
            live.copy_(torch.where(inside[:, None, None], new, live))
            out[rows[inside]] = y[inside].to(out.dtype)
    return out
