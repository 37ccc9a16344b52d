"""Linear attention whose state decays by one number per head and token: Mamba-2's SSD and lightning attention.

Per head, with key k, value v, query q, decay exp(g) and write strength beta (all per token)::

    S_t = exp(g_t) S_{t-1} + k_t (beta_t v_t)^T        S: [K, V]
    o_t = S_t^T q_t + skip * v_t

Each of the G groups of queries and keys serves ``H / G`` consecutive heads. In Mamba-2 (arXiv 2405.21060) q, k, v are
C, B, x, beta is the time step and g is the time step times A. In lightning attention (arXiv 2401.04658) beta is one, g
is a constant of the head, and there is no skip.

Job: outputs and states, all arithmetic in float32. Owns: the state layout ``[num_slots, H, K, V]``, float32 or bfloat16
(rounded at the store only). Does not know: projections, convolution, norms.
"""

import torch
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.chunks import ChunkWalk
from weft.ops.device_work import device_work
from weft.ops.padding import settle_padding
from weft.ops.rows import by_chunk, by_row, whole


def linear_attention_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """Compute one token for each of N rows that continue a state. The state advances in place.

    Args:
        q, k: ``[N, G, K]``.
        v: ``[N, H, V]``.
        g, beta: ``[N, H]`` float32; beta None: one.
        skip: ``[H]`` or None: none.
        state: ``[num_slots, H, K, V]``.
        state_slots: ``[N]`` integers; only slot 0 (padding) may occur more than once.

    Returns:
        ``[N, H, V]`` in v's dtype.
    """
    slots, group, values = state_slots.long(), v.shape[1] // q.shape[1], v.float()
    queries, keys = (x.float().repeat_interleave(group, dim=1) for x in (q, k))
    written = values if beta is None else values * beta[..., None]
    new = state.index_select(0, slots).float().mul_(g.exp()[..., None, None])
    new.addcmul_(keys.unsqueeze(-1), written.unsqueeze(-2))
    state.index_copy_(0, slots, new.to(state.dtype))
    out = torch.matmul(queries.unsqueeze(-2), new).squeeze(-2)
    return _skipped(out, values, skip).to(v.dtype)


def _skipped(out: Tensor, values: Tensor, skip: Tensor | None) -> Tensor:
    return out if skip is None else out.addcmul_(skip.float()[:, None], values)


@with_kernel("weft.ops.linear_attention.prefill", by_chunk("q", "k", "g", "beta", "v", states=("state",)))
def chunk_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
    batch: Batch,
    *,
    backend: Backend,
) -> Tensor:
    """Run the sequences from ``batch.num_decodes`` on through the recurrence, cut as ``batch.chunks`` says.

    Args:
        q, k: ``[T, G, K]``; tokens may be strided (slices of a wider projection), heads must be dense.
        v: ``[T, H, V]``, as q; H is a multiple of G.
        g: ``[T, H]`` float32, at most 0; a constant may be expanded over tokens.
        beta: ``[T, H]`` float32; None: one.
        skip: ``[H]``; None: none.
        state: ``[num_slots, H, K, V]``. A sequence starts from the state in its slot of ``batch.state_slots``, or from
            zero if it begins in this step. The final state is written to the same slot, and the state after a chunk to
            the chunk's ``checkpoint_slot``, if any, in the same pass.

    Returns:
        ``[T, H, V]`` in v's dtype; rows outside those sequences are zero.
    """
    out = v.new_zeros(v.shape)
    if batch.mixed is not None:
        given, states = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "skip": skip}, {"state": state}
        return device_work(chunk_linear_attention.reference, batch, out, given, states)
    if batch.num_decodes == batch.num_seqs:
        return out
    walk = ChunkWalk(batch, state)
    queries, inside, written, decay = _intra_chunk(q, k, v, g, beta, walk)
    before = queries.new_empty(*queries.shape[:2], CHUNK_SIZE, v.shape[2])
    for step, live in walk.steps():
        before[step] = torch.matmul(queries[step], live)
        live.mul_(decay[step]).add_(written[step])
    o = (before + inside).transpose(1, 2)[walk.valid]  # [tokens, H, V]
    rows = walk.tokens[walk.valid]
    out[rows] = _skipped(o, v[rows].float(), skip).to(out.dtype)
    return out


def _intra_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, walk: ChunkWalk
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything that needs no state, for all chunks at once; cells past the chunk's end have k = v = g = 0.

    Returns:
        Queries with the decay since the chunk's start ``[C, H, 64, K]``, outputs from inside the chunk
        ``[C, H, 64, V]``, what the chunk adds to the state ``[C, H, K, V]``, and its whole decay ``[C, H, 1, 1]``.
    """
    group, chunked = v.shape[1] // k.shape[1], walk.cells
    queries, keys = (chunked(x).repeat_interleave(group, dim=1) for x in (q, k))
    values = chunked(v) if beta is None else chunked(v) * chunked(beta.unsqueeze(-1))
    log_decay = chunked(g.unsqueeze(-1)).cumsum(2)
    lower = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=v.device).tril()
    pairwise = (log_decay - log_decay.transpose(2, 3)).masked_fill_(~lower, -torch.inf).exp_()
    inside = torch.matmul(torch.matmul(queries, keys.transpose(2, 3)).mul_(pairwise), values)
    last = log_decay[:, :, -1:]
    written = torch.matmul((keys * (last - log_decay).exp()).transpose(2, 3), values)
    return queries * log_decay.exp(), inside, written, last.exp()


def lightning_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    state_slots: Tensor,
    *,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one token of lightning attention for each of N rows that continue a state. The state advances in place.

    Args:
        q, k, v: ``[N, H, D]``; rows may be strided.
        log_decay: ``[H]`` float32, at most 0.
        state: ``[num_slots, H, D, D]``.
        state_slots: ``[N]`` int32; rows with slot 0 are padding: zero, or left as they are in a given ``out``.
        out: ``[N, H, D]`` to write to.

    Returns:
        ``[N, H, D]`` in q's dtype.
    """
    if not backend.is_torch:
        from weft.ops.linear_attention.decode import linear_attention_step

        return linear_attention_step(q, k, v, log_decay, state, state_slots, out=out)
    step = by_row("q", "k", "v", "g", "state_slots") if backend.is_invariant else whole
    g = log_decay.expand(q.shape[0], -1)
    y = step(linear_attention_step_reference, q, k, v, g, None, None, state, state_slots)
    return settle_padding(y, state_slots, out)
