"""Everything that Gated DeltaNet does between its two projections for one decoding token per row, as one operation.

Job: convolution update, SiLU, gates, L2 norms, delta rule and gated output norm in a row. Owns: the order of the merged
projection, ``q | k | v | z | b | a``, on the reading side. Does not know: the projections themselves, or slots' owners.
"""

from __future__ import annotations

from torch import Tensor

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.ops.backend import Backend, with_kernel
from weft.ops.causal_conv1d import causal_conv1d_update_reference
from weft.ops.gated_delta_rule import gdn_gates, recurrent_gated_delta_rule_reference
from weft.ops.norm import gated_rms_norm
from weft.ops.padding import settle_padding


@with_kernel("weft.ops.triton.gdn_decode")
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
