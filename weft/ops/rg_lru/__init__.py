"""The Real-Gated Linear Recurrent Unit (RG-LRU) of Griffin (arXiv 2402.19427), token by token.

Per channel, with input x, the gates i and r before their sigmoids, and the channel's parameter p::

    a_t = exp(-8 sigmoid(r_t) softplus(p))
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t        the first token of a sequence: h_t = sigmoid(i_t) x_t

Job: outputs and states, all arithmetic in float32. Owns: the state layout ``[num_slots, C]``, float32 or bfloat16
(rounded at the store only). Does not know: projections, convolution, or slots' owners.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.chunks import ChunkWalk
from weft.ops.device_work import device_work
from weft.ops.padding import settle_padding
from weft.ops.rows import by_chunk, by_row


def _decay_and_input(x: Tensor, gates: Tensor, bias: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and gated input of tokens ``[..., C]``, in float32; ``gates [..., 2, C]``."""
    input_gate, recurrent_gate = (gates.float() + bias.float()).unbind(-2)
    return -8.0 * recurrent_gate.sigmoid() * F.softplus(decay.float()), x.float() * input_gate.sigmoid()


@with_kernel("weft.ops.rg_lru.scan", by_row("x", "gates", "state_slots"))
def rg_lru_step(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    decay: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one token for each of R rows that continue a state. The state advances in place.

    Args:
        x: ``[R, C]``.
        gates: ``[R, 2, C]``, the input gate and the recurrent gate before their biases and sigmoids.
        bias: ``[2, C]`` of the gates.
        decay: ``[C]``, the parameter p.
        state: ``[num_slots, C]``.
        state_slots: ``[R]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out [R, C]``.

    Returns:
        ``[R, C]`` in x's dtype.
    """
    slots = state_slots.long()
    log_a, gated = _decay_and_input(x, gates, bias, decay)
    new = log_a.exp() * state.index_select(0, slots).float() + (1.0 - (2.0 * log_a).exp()).sqrt() * gated
    state.index_copy_(0, slots, new.to(state.dtype))
    return settle_padding(new.to(x.dtype), state_slots, out)


@with_kernel("weft.ops.rg_lru.scan", by_chunk("gates", "x", states=("state",)))
def rg_lru(
    x: Tensor, gates: Tensor, bias: Tensor, decay: Tensor, state: Tensor, batch: Batch, *, backend: Backend
) -> Tensor:
    """Run the sequences from ``batch.num_decodes`` on through the recurrence; arguments as in ``rg_lru_step``.

    A sequence continues the state in its slot of ``batch.state_slots``, unless it begins in this step. The final state
    is written to the same slot, and the state after a chunk to the chunk's ``checkpoint_slot``, if any.

    Returns:
        ``[T, C]`` in x's dtype; rows outside those sequences are zero.
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if batch.mixed is not None:
        given = {"x": x, "gates": gates, "bias": bias, "decay": decay}
        return device_work(rg_lru.reference, batch, out, given, {"state": state})
    if batch.num_decodes == batch.num_seqs:
        return out
    log_a, gated = _decay_and_input(x, gates, bias, decay)
    factor = torch.where(batch.positions[:, None] == 0, 1.0, (1.0 - (2.0 * log_a).exp()).sqrt())
    decays, inputs = log_a.exp(), factor * gated
    walk = ChunkWalk(batch, state)
    for step, live in walk.steps():  # the sequences side by side, token by token
        for t in range(int(walk.valid[step].sum(1).max())):
            rows, inside = walk.tokens[step, t], walk.valid[step, t]
            live.copy_(torch.where(inside[:, None], decays[rows] * live + inputs[rows], live))
            out[rows[inside]] = live[inside].to(out.dtype)
    return out
