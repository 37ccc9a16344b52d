"""Everything that Gated DeltaNet does between its two projections for one decoding token per row, as one operation, and
for a few tokens of each sequence, where drafts are verified.

Job: convolution update, SiLU, gates, L2 norms, delta rule and gated output norm in a row. Owns: the order of the merged
projection, ``q | k | v | z | b | a``, on the reading side. Does not know: the projections themselves, slots' owners, or
which drafts will be accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.ops.backend import Backend, with_kernel
from weft.ops.convolution import causal_conv1d_update_reference
from weft.ops.delta_rule import gdn_gates, recurrent_gated_delta_rule_reference
from weft.ops.norm import gated_rms_norm
from weft.ops.padding import settle_padding


@with_kernel("weft.ops.delta_rule.decode")
def gdn_decode(
    projected: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: GatedDeltaNetConfig,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of N rows that continue a state; both states advance in place.

    Args:
        projected: ``[N, C + HV * V + 2 * HV]``, ``q | k | v | z | b | a`` with ``C = 2 * HK * K + HV * V``.
        conv_weight: ``[C, W]``.
        A_log, dt_bias: ``[HV]``.
        norm_weight: ``[V]``, of the gated output norm.
        eps: of that norm.
        conv_state: ``[num_slots, C, W - 1]``.
        state: ``[num_slots, HV, K, V]``, float32 or bfloat16.
        state_slots: ``[N]`` int32. Rows with slot 0 are padding: their output is zero, or as it is in a given ``out``;
            only the reserved slot's state may change. Other slots occur once.
        geometry: heads and sizes of this rank's share.
        out: ``[N, HV * V]`` to write to, optional.

    Returns:
        ``[N, HV * V]`` in projected's dtype, ready for the output projection.
    """
    # The operations that the kernel fuses, one after the other.
    key_dim, value_dim, num_v_heads = geometry.key_dim, geometry.value_dim, geometry.num_v_heads
    qkv, z, b, a = projected.split([geometry.conv_dim, value_dim, num_v_heads, num_v_heads], dim=-1)
    g, beta = gdn_gates.reference(a, b, A_log, dt_bias, negative_eigenvalues=geometry.negative_eigenvalues)
    qkv = causal_conv1d_update_reference(qkv, conv_weight, conv_state, state_slots)
    q, k, v = qkv.split([key_dim, key_dim, value_dim], dim=-1)
    q, k = (x.unflatten(-1, (geometry.num_k_heads, geometry.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (num_v_heads, geometry.head_v_dim))
    o = recurrent_gated_delta_rule_reference(q, k, v, g, beta, state, state_slots)
    normed = gated_rms_norm.reference(o.flatten(0, 1), z.reshape(-1, geometry.head_v_dim), norm_weight, eps)
    return settle_padding(normed.view(-1, value_dim), state_slots, out)


@with_kernel("weft.ops.delta_rule.verify")
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
    """T tokens for each of S sequences that continue a state: what ``gdn_decode`` does, token after token, with the
    states after every token kept in slots of their own.

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
