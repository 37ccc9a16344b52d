"""The gated delta rule of Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692).

Per value head, with key k, value v, decay exp(g) and write strength beta (all per token)::

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_t^T exp(g_t) S_{t-1}))^T        S: [K, V]
    o_t = S_t^T q_t

Queries and keys are L2-normalised (eps 1e-6 under the root), queries are scaled by ``K ** -0.5``; each of the HK key
heads serves ``HV / HK`` consecutive value heads. In Kimi Delta Attention g has a value per channel of the key, ``[K]``,
and ``exp(g)`` decays the rows of S.

Job: gates, outputs and states, all arithmetic in float32: chunked for prefill; for decoding rows and for the tokens of
draft verification, everything between the layer's two projections as one operation. Owns: the state layout
``[num_slots, HV, K, V]``, float32 or bfloat16 (rounded at the store only), the checkpoint stores, and the order of the
merged projections on the reading side (``q | k | v | z | b | a``; KDA: ``q | k | v | b``). Does not know: the
projections themselves, slots' owners, or which drafts will be accepted.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.config.gated_delta_net import L2_EPS, GatedDeltaNetConfig
from weft.config.kimi import KimiDeltaConfig
from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.chunks import ChunkWalk
from weft.ops.convolution import causal_conv1d_update_reference
from weft.ops.device_work import device_work
from weft.ops.norm import gated_rms_norm
from weft.ops.padding import settle_padding
from weft.ops.rows import by_chunk, by_row, by_sequence
from weft.ops.verification import decode_each_token


@with_kernel("weft.ops.delta_rule.gdn_prefill", by_row("a", "b"))
def gdn_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, negative_eigenvalues: bool = False, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Log decay ``g = -exp(A_log) * softplus(a + dt_bias)`` and write strength ``beta = sigmoid(b)``.

    Args:
        a, b: ``[T, HV]``; tokens may be strided (slices of a wider projection).
        A_log, dt_bias: ``[HV]``.
        negative_eigenvalues: ``beta = 2 * sigmoid(b)`` (arXiv 2411.12537).

    Returns:
        ``(g, beta)``, each ``[T, HV]`` float32; g is at most 0.
    """
    g = F.softplus(a.float() + dt_bias.float()) * -A_log.float().exp()
    beta = b.float().sigmoid()
    return g, 2.0 * beta if negative_eigenvalues else beta


def _l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def recurrent_gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor
) -> Tensor:
    """Compute one step for N rows, as torch operations. States advance in place. Part of ``gdn_decode``.

    The state is read once: ``o = exp(g) S^T q + (q . k) delta`` gives the output without the updated state.

    Args:
        q, k: ``[N, HK, K]``, not yet normalised.
        v: ``[N, HV, V]``; HV is a multiple of HK.
        g: ``[N, HV]`` float32 from ``gdn_gates``, or ``[N, HV, K]`` from ``kda_gates``.
        beta: ``[N, HV]`` float32.
        state: ``[num_slots, HV, K, V]``.
        state_slots: ``[N]`` integers; only slot 0 (padding) may occur more than once.

    Returns:
        ``[N, HV, V]`` in v's dtype.
    """
    num_v_heads = v.shape[1]
    slots = state_slots.long()
    qk = _l2norm(torch.stack([q, k], dim=2).float())  # [N, HK, 2, K]
    if num_v_heads != q.shape[1]:
        qk = qk.repeat_interleave(num_v_heads // q.shape[1], dim=1)
    decay = g.exp()[..., None] if g.dim() == 3 else g.exp()[..., None, None]
    old = state.index_select(0, slots).float().mul_(decay)
    from_q, from_k = torch.matmul(qk, old).unbind(2)
    delta = (v.float() - from_k).mul_(beta.unsqueeze(-1))
    queries, keys = qk.unbind(2)
    overlap = (queries * keys).sum(-1, keepdim=True)
    old.addcmul_(keys.unsqueeze(-1), delta.unsqueeze(-2))
    state.index_copy_(0, slots, old.to(state.dtype))
    return from_q.addcmul(overlap, delta).mul_(q.shape[-1] ** -0.5).to(v.dtype)


@with_kernel("weft.ops.delta_rule.gdn_prefill", by_chunk("q", "k", "g", "beta", "v", states=("state",)))
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    batch: Batch,
    *,
    backend: Backend,
) -> Tensor:
    """Run the sequences from ``batch.num_decodes`` on through the rule, cut as ``batch.chunks`` says.

    Args:
        q, k: ``[T, HK, K]``, not yet normalised.
        v: ``[T, HV, V]``; HV is a multiple of HK.
        g: ``[T, HV]`` float32 from ``gdn_gates``, or ``[T, HV, K]`` from ``kda_gates`` (then HK equals HV).
        beta: ``[T, HV]`` float32.
        state: ``[num_slots, HV, K, V]``. A sequence starts from the state in its slot of ``batch.state_slots``, or from
            zero if it begins in this step. The final state is written to the same slot, and the state after a chunk to
            the chunk's ``checkpoint_slot``, if any, in the same pass.

    Returns:
        ``[T, HV, V]`` in v's dtype; rows outside those sequences are zero.
    """
    out = v.new_zeros(v.shape)
    if batch.mixed is not None:
        given, states = {"q": q, "k": k, "v": v, "g": g, "beta": beta}, {"state": state}
        return device_work(chunk_gated_delta_rule.reference, batch, out, given, states)
    if batch.num_decodes == batch.num_seqs:
        return out
    walk = ChunkWalk(batch, state)
    wq, u, attention, k_decayed, decay = _intra_chunk(q, k, v, g, beta, walk)
    inter = torch.empty_like(u)
    for step, live in walk.steps():
        from_w, from_q = torch.matmul(wq[step], live).split(CHUNK_SIZE, dim=2)
        u[step] -= from_w
        inter[step] = from_q
        live.mul_(decay[step]).add_(torch.matmul(k_decayed[step].transpose(2, 3), u[step]))
    o = inter.add_(torch.matmul(attention, u)).transpose(1, 2)  # [chunks, 64, HV, V]
    out[walk.tokens[walk.valid]] = o[walk.valid].to(out.dtype)
    return out


def _intra_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, walk: ChunkWalk
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything that needs no state, for all chunks at once (the WY form of arXiv 2406.06484, with decay).

    Unrolling the recurrence inside a chunk gives ``(I + A) (U - W S) = beta (V - decayed K S)`` with A strictly lower
    triangular, ``A_ij = beta_i (k_i . k_j) exp(G_i - G_j)``, G the running sum of g. Cells past the chunk's end have
    k = v = g = beta = 0 and so change nothing.

    Returns:
        ``wq [C, HV, 128, K]`` (W above the decayed queries), ``u [C, HV, 64, V]``, the masked attention inside the
        chunk ``[C, HV, 64, 64]``, keys decayed to the chunk's end ``[C, HV, 64, K]``, and the chunk's whole decay
        ``[C, HV, 1 or K, 1]``.
    """
    group, chunked = v.shape[1] // k.shape[1], walk.cells
    queries = _l2norm(chunked(q)).mul_(q.shape[-1] ** -0.5).repeat_interleave(group, dim=1)
    keys = _l2norm(chunked(k)).repeat_interleave(group, dim=1)
    values = chunked(v)
    strength = chunked(beta.unsqueeze(-1))
    log_decay = chunked(g if g.dim() == 3 else g.unsqueeze(-1)).cumsum(2)  # [C, HV, 64, 1 or K]
    scores = _channel_scores if g.dim() == 3 else _head_scores
    system, attention = scores(keys * strength, queries, keys, log_decay)
    decayed = log_decay.exp()
    right_side = torch.cat([keys * (strength * decayed), values * strength], dim=3)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    w, u = solved.split([keys.shape[3], values.shape[3]], dim=3)
    last = log_decay[:, :, -1:]
    wq = torch.cat([w, queries * decayed], dim=2)
    return wq, u.contiguous(), attention, keys * (last - log_decay).exp(), last.exp().transpose(2, 3)


def _head_scores(writes: Tensor, queries: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """``exp(G_i - G_j) (x_i . k_j)`` for i >= j and both x, ``[C, HV, 64, 64]``, with one decay per head."""
    lower = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=keys.device).tril()
    pairwise = (log_decay - log_decay.transpose(2, 3)).masked_fill_(~lower, -torch.inf).exp_()
    scores = torch.matmul(torch.cat([writes, queries], dim=2), keys.transpose(2, 3))
    system, attention = (s * pairwise for s in scores.split(CHUNK_SIZE, dim=2))
    return system, attention


def _channel_scores(writes: Tensor, queries: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a decay per channel, row by row: the factors of a product of matrices would overflow."""
    rows = torch.stack([writes, queries], dim=3)  # [C, HV, 64, 2, K]
    scores = keys.new_zeros(*keys.shape[:2], 2, CHUNK_SIZE, CHUNK_SIZE)
    for i in range(CHUNK_SIZE):
        decayed = keys[:, :, : i + 1] * (log_decay[:, :, i : i + 1] - log_decay[:, :, : i + 1]).exp()
        scores[:, :, :, i, : i + 1] = torch.matmul(rows[:, :, i], decayed.transpose(2, 3))
    return scores[:, :, 0], scores[:, :, 1]


class DeltaWeights(NamedTuple):
    """Weights of one rank between the projections of a layer.

    Attributes:
        conv_weight: ``[C, W]``, with ``C = 2 * HK * K + HV * V`` channels.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``; with gates per channel ``[HV * K]``.
        norm_weight: ``[V]``, of the gated output norm.
        eps: of that norm.
    """

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    eps: float


@with_kernel("weft.ops.delta_rule.few_tokens", by_row("projected", "state_slots"))
def gdn_decode(
    projected: Tensor,
    weights: DeltaWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: GatedDeltaNetConfig,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one token for each of N rows that continue a state. Both states advance in place.

    Args:
        projected: ``[N, C + HV * V + 2 * HV]``, ``q | k | v | z | b | a`` with ``C = 2 * HK * K + HV * V``.
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
    doubled = geometry.negative_eigenvalues
    g, beta = gdn_gates.reference(a, b, weights.A_log, weights.dt_bias, negative_eigenvalues=doubled)
    qkv = causal_conv1d_update_reference(qkv, weights.conv_weight, conv_state, state_slots)
    q, k, v = qkv.split([key_dim, key_dim, value_dim], dim=-1)
    q, k = (x.unflatten(-1, (geometry.num_k_heads, geometry.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (num_v_heads, geometry.head_v_dim))
    o = recurrent_gated_delta_rule_reference(q, k, v, g, beta, state, state_slots)
    z = z.reshape(-1, geometry.head_v_dim)
    normed = gated_rms_norm.reference(
        o.flatten(0, 1), z, weights.norm_weight, weights.eps, activation=geometry.gate_activation
    )
    return settle_padding(normed.view(-1, value_dim), state_slots, out)


@with_kernel("weft.ops.delta_rule.few_tokens", by_sequence("projected", "state_slots", "slots"))
def gdn_verify(
    projected: Tensor,
    weights: DeltaWeights,
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
        conv_state: ``[num_slots, C, W - 1]``.
        state: ``[num_slots, HV, K, V]``, float32 or bfloat16; rounded to that after every token, as decoding does.
        state_slots: ``[S]`` int32, the slots that hold the states before these tokens. Slot 0: the sequence is padding,
            its output is zero, and only the reserved slot's state may change.
        slots: ``[S, T]`` int32, the slots that receive the states after each token; 0: nothing is kept (but with an
            invariant backend only of padding). A slot of ``state_slots`` may occur in its own row. No other slot occurs
            twice.

    Returns:
        ``[S * T, HV * V]`` in projected's dtype, ready for the output projection.
    """

    def decode(x: Tensor, *states: Tensor) -> Tensor:
        return gdn_decode.reference(x, weights, *states, geometry)

    return decode_each_token(decode, [projected], [conv_state, state], state_slots, slots)


@with_kernel("weft.ops.delta_rule.kda_prefill", by_row("f", "b"))
def kda_gates(
    f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, floor: float = 0.0, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Log decays ``g = -exp(A_log) * softplus(f + dt_bias)`` and write strengths ``beta = sigmoid(b)``.

    Args:
        f: ``[T, H * K]``, the forget gate's projection; rows may be strided.
        b: ``[T, H]``; rows may be strided.
        A_log: ``[H]``.
        dt_bias: ``[H * K]``.
        floor: a lower bound below 0, with which ``g = floor * sigmoid(exp(A_log) * (f + dt_bias))``.

    Returns:
        ``g [T, H, K]`` and ``beta [T, H]``, float32; g is at most 0.
    """
    x = (f.float() + dt_bias.float()).unflatten(-1, (A_log.shape[0], -1))
    rate, beta = A_log.float().exp()[:, None], b.float().sigmoid()
    return (rate * x).sigmoid() * floor if floor else F.softplus(x) * -rate, beta


@with_kernel("weft.ops.delta_rule.few_tokens", by_row("projected", "f", "gate", "state_slots"))
def kda_decode(
    projected: Tensor,
    f: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: KimiDeltaConfig,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one token for each of N rows that continue a state. Both states advance in place.

    Args:
        projected: ``[N, 3 * H * K + H + ...]``, ``q | k | v | b``; more columns may follow.
        f, gate: ``[N, H * K]``, projections of the forget gate and of the output gate.
        weights: the gate of the output norm is a sigmoid.
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
    g, beta = kda_gates.reference(f, b, weights.A_log, weights.dt_bias, floor=geometry.gate_floor)
    qkv = causal_conv1d_update_reference(qkv, weights.conv_weight, conv_state, state_slots)
    q, k, v = qkv.unflatten(-1, (3, heads, dim)).unbind(1)
    o = recurrent_gated_delta_rule_reference(q, k, v, g, beta, state, state_slots)
    gate = gate.reshape(-1, dim)
    normed = gated_rms_norm.reference(
        o.flatten(0, 1), gate, weights.norm_weight, weights.eps, activation="sigmoid"
    )  # fmt: skip
    return settle_padding(normed.view(-1, heads * dim), state_slots, out)


@with_kernel("weft.ops.delta_rule.few_tokens", by_sequence("projected", "f", "gate", "state_slots", "slots"))
def kda_verify(
    projected: Tensor,
    f: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    slots: Tensor,
    geometry: KimiDeltaConfig,
    *,
    backend: Backend,
) -> Tensor:
    """T tokens for each of S sequences that continue a state: what ``kda_decode`` does, token after token, with the
    states after every token kept in slots of their own.

    Args:
        projected, f, gate: as of ``kda_decode``, with ``S * T`` rows, the tokens of a sequence side by side.
        weights, conv_state, state, geometry: as of ``kda_decode``.
        state_slots, slots: as of ``gdn_verify``.

    Returns:
        ``[S * T, H * K]`` in projected's dtype, ready for the output projection.
    """

    def decode(x: Tensor, f: Tensor, gate: Tensor, *states: Tensor) -> Tensor:
        return kda_decode.reference(x, f, gate, weights, *states, geometry)

    return decode_each_token(decode, [projected, f, gate], [conv_state, state], state_slots, slots)
