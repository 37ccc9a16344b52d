"""Gated DeltaNet between its two projections where drafts are verified: a few tokens of each sequence at once.

Job: what ``gdn_decode`` does, token after token, with the states after every token kept in slots of their own. Owns:
which slot is read and which are written. Does not know: which drafts will be accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.ops.backend import Backend, with_kernel
from weft.ops.gdn_decode import gdn_decode


@with_kernel("weft.ops.triton.gdn_verify")
def gdn_verify(
    projected: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    slots: Tensor,
    geometry: GatedDeltaNetConfig,
    *,
    backend: Backend,
) -> Tensor:
    """T tokens for each of S sequences that continue a state.

    Args:
        projected: ``[S * T, C + HV * V + 2 * HV]``, ``q | k | v | z | b | a`` with ``C = 2 * HK * K + HV * V``, the
            tokens of a sequence side by side.
        conv_weight, A_log, dt_bias, norm_weight, eps, geometry: as in ``gdn_decode``.
        conv_state: ``[num_slots, C, W - 1]``.
        state: ``[num_slots, HV, K, V]``, float32 or bfloat16; rounded to that after every token, as decoding does.
        state_slots: ``[S]`` int32, the slots that hold the states before these tokens. Slot 0: the sequence is padding,
            its output is zero, and only the reserved slot's state may change.
        slots: ``[S, T]`` int32, the slots that receive the states after each token; 0: nothing is kept. Those of
            ``state_slots`` may be among them, each in its own row; no other slot occurs twice.

    Returns:
        ``[S * T, HV * V]`` in projected's dtype, ready for the output projection.
    """
    # Decode steps on copies of the states, which go to their slots after each.
    num_seqs, query_len = slots.shape
    rows = projected.view(num_seqs, query_len, -1)
    weights = (conv_weight, A_log, dt_bias, norm_weight, eps)
    first = state_slots.new_zeros(1)
    read = torch.cat([first, state_slots]).long()  # entry 0 is reserved, as in the caches
    local = torch.arange(1, num_seqs + 1, dtype=state_slots.dtype, device=state_slots.device) * (state_slots > 0)
    conv, running, outputs = conv_state[read], state[read], []
    for i in range(query_len):
        outputs.append(gdn_decode.reference(rows[:, i], *weights, conv, running, local, geometry))
        after = slots[:, i].long()
        conv_state[after], state[after] = conv[1:], running[1:]
    return torch.stack(outputs, dim=1).flatten(0, 1)
