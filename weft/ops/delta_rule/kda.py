"""What Kimi Delta Attention (arXiv 2510.26692) adds to the gated delta rule: gates per channel, and its decode step.

Job: the gates, and everything between the projections for one decoding token per row. Owns: the order of the merged
projection, ``q | k | v | b``, on the reading side. Does not know: the projections, or slots' owners.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.config.kimi import KimiDeltaConfig
from weft.ops.backend import Backend, with_kernel
from weft.ops.convolution import causal_conv1d_update_reference
from weft.ops.delta_rule import recurrent_gated_delta_rule_reference
from weft.ops.norm import gated_rms_norm
from weft.ops.padding import settle_padding


@with_kernel("weft.ops.delta_rule.kda_prefill")
def kda_gates(f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, backend: Backend) -> tuple[Tensor, Tensor]:
    """Log decays ``g = -exp(A_log) * softplus(f + dt_bias)`` and write strengths ``beta = sigmoid(b)``.

    Args:
        f: ``[T, H * K]``, the forget gate's projection; rows may be strided.
        b: ``[T, H]``; rows may be strided.
        A_log: ``[H]``.
        dt_bias: ``[H * K]``.

    Returns:
        ``g [T, H, K]`` and ``beta [T, H]``, float32; g is at most 0.
    """
    x = (f.float() + dt_bias.float()).unflatten(-1, (A_log.shape[0], -1))
    return F.softplus(x) * -A_log.float().exp()[:, None], b.float().sigmoid()


@with_kernel("weft.ops.delta_rule.decode")
def kda_decode(
    projected: Tensor,
    f: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: KimiDeltaConfig,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of N rows that continue a state; both states advance in place.

    Args:
        projected: ``[N, 3 * H * K + H + ...]``, ``q | k | v | b``; more columns may follow.
        f, gate: ``[N, H * K]``, projections of the forget gate and of the output gate.
        conv_weight: ``[3 * H * K, W]``.
        A_log, dt_bias: see ``kda_gates``.
        norm_weight: ``[K]``, of the output norm, whose gate is a sigmoid; eps of that norm.
        conv_state: ``[num_slots, 3 * H * K, W - 1]``.
        state: ``[num_slots, H, K, K]``, float32 or bfloat16.
        state_slots: ``[N]`` int32. Rows with slot 0 are padding: their output is zero, or as it is in a given ``out``;
            only the reserved slot's state may change. Other slots occur once.
        geometry: heads and sizes of this rank's share.
        out: ``[N, H * K]`` to write to, optional.

    Returns:
        ``[N, H * K]`` in projected's dtype, ready for the output projection.
    """
    # The operations that the kernel fuses, one after the other.
    heads, dim = geometry.num_heads, geometry.head_dim
    qkv, b = projected[:, : 3 * heads * dim], projected[:, 3 * heads * dim : 3 * heads * dim + heads]
    g, beta = kda_gates.reference(f, b, A_log, dt_bias)
    qkv = causal_conv1d_update_reference(qkv, conv_weight, conv_state, state_slots)
    q, k, v = qkv.unflatten(-1, (3, heads, dim)).unbind(1)
    o = recurrent_gated_delta_rule_reference(q, k, v, g, beta, state, state_slots)
    normed = gated_rms_norm.reference(
        o.flatten(0, 1), gate.reshape(-1, dim), norm_weight, eps, activation="sigmoid"
    )  # fmt: skip
    return settle_padding(normed.view(-1, heads * dim), state_slots, out)
