"""Causal softmax attention over a sliding window, whose keys and values lie in a state slot.

Job: attend over a sequence's window and this step's tokens, and keep the window up to date. Owns: the layout of the
windows, ``[num_slots, window, Hkv, D]``: the entry of a token is its position modulo the window. Does not know: rotary
embedding (keys are stored as they are compared), or what a layer is.

Entries that a short sequence has not reached may hold anything, NaN included; they are never read. A *sink* is a
learned score per head that takes part in the softmax and has no value (arXiv 2309.17453, as in gpt-oss).
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.device_work import device_work
from weft.ops.padding import settle_padding
from weft.ops.rows import by_chunk, by_row


class Windows(NamedTuple):
    """The keys and the values of all windows, ``[num_slots, window, Hkv, D]`` each."""

    k: Tensor
    v: Tensor


class ScoreTerms(NamedTuple):
    """Optional terms of scores.

    Attributes:
        sinks: ``[Hq]`` scores without a value; ``[N, Hq]``, contiguous: every row has its own.
        bias: ``[N, Hq, window]``, contiguous. ``q k^T`` of the key that is d tokens back is increased by entry d.
    """

    sinks: Tensor | None = None
    bias: Tensor | None = None


NO_TERMS = ScoreTerms()


@with_kernel("weft.ops.window_attention.kernels", by_row("q", "k", "v", "state_slots", "positions", "terms.bias"))
def window_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Windows,
    state_slots: Tensor,
    positions: Tensor,
    *,
    scale: float,
    terms: ScoreTerms = NO_TERMS,
    out: Tensor | None = None,
    backend: Backend,
) -> Tensor:
    """Compute one token for each of N rows that continue a window. The windows advance in place.

    Args:
        q: ``[N, Hq, D]``; Hq is a multiple of Hkv, and query head h reads key head ``h // (Hq / Hkv)``.
        k, v: ``[N, Hkv, D]``, the token's own.
        state_slots: ``[N]`` int32. Rows with slot 0 are padding: their output is zero, or as it is in a given ``out``;
            only the reserved slot's window may change. Other slots occur once.
        positions: ``[N]`` int64, of the tokens in their sequences.
        scale: of the scores.
        out: ``[N, Hq, D]`` to write to, optional.

    Returns:
        ``[N, Hq, D]`` in q's dtype.
    """
    (rows, window), (sinks, bias) = (q.shape[0], windows.k.shape[1]), terms
    slots = state_slots.long()
    for new, kept in zip((k, v), windows, strict=True):
        kept[slots, positions % window] = new.to(kept.dtype)
    valid = torch.arange(window, device=q.device) <= positions[:, None]
    keys, values = (torch.where(valid[:, :, None, None], kept.index_select(0, slots), 0.0) for kept in windows)
    grouped = q.view(rows, keys.shape[2], -1, q.shape[2])
    scores = torch.einsum("nhgd,nwhd->nhgw", grouped.float(), keys.float())
    if bias is not None:
        back = (positions[:, None] - torch.arange(window, device=q.device)) % window
        scores += bias.float().gather(2, back[:, None].expand(-1, q.shape[1], -1)).view(scores.shape)
    scores = scores * scale
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
    attended = torch.einsum("nhgw,nwhd->nhgd", _softmax(scores, sinks), values.float()).flatten(1, 2).to(q.dtype)
    return settle_padding(attended, state_slots, out)


@with_kernel("weft.ops.window_attention.kernels", by_chunk("k", "v", "bias", "q", states=("k_window", "v_window")))
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    batch: Batch,
    *,
    scale: float,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    backend: Backend,
) -> Tensor:
    """Attend for the sequences from ``batch.num_decodes`` on; read and update their windows.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[T, Hkv, D]``.
        k_window, v_window: ``[num_slots, window, Hkv, D]``. Tokens before this step are in the slots of
            ``batch.state_slots``; a sequence that begins in this step has none. The final window is written to the same
            slot, and the window after a chunk to the chunk's ``checkpoint_slot``, if any.
        scale: of the scores.
        sinks, bias: as in ``ScoreTerms``; ``bias [T, Hq, window]``, and sinks of rows ``[T, Hq]``.

    Returns:
        ``[T, Hq, D]`` in q's dtype; rows outside those sequences are zero.
    """
    # One sequence after the other.
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if batch.mixed is not None:
        given = {"q": q, "k": k, "v": v, "scale": scale, "sinks": sinks, "bias": bias}
        states = {"k_window": k_window, "v_window": v_window}
        return device_work(window_attention.reference, batch, out, given, states)
    if batch.num_decodes == batch.num_seqs:
        return out
    chunks = batch.chunk_table
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    ends = (chunks.start + chunks.length).tolist()
    targets, first = chunks.checkpoint_slot.tolist(), chunks.first.tolist()
    for seq, (begin, end) in enumerate(pairwise(starts[: batch.num_seqs + 1])):
        if seq < batch.num_decodes:
            continue
        tokens, slot, length = slice(begin, end), int(batch.state_slots[seq]), seq_lens[seq]
        before = length - (end - begin)
        stored = range(max(0, before - k_window.shape[1]), before)
        keys, values = (
            torch.cat([_entries(windows[slot], stored), new[tokens]]) for windows, new in ((k_window, k), (v_window, v))
        )
        added = None if bias is None else bias[tokens]
        own = None if sinks is None else sinks.expand(q.shape[:2])[tokens]
        out[tokens] = _attend(q[tokens], keys, values, before - stored.start, k_window.shape[1], scale, own, added)
        stops = {targets[i]: ends[i] - begin for i in range(first[seq], first[seq + 1]) if targets[i] >= 0}
        for target, count in (*stops.items(), (slot, end - begin)):
            for windows, all_entries in ((k_window, keys), (v_window, values)):
                _store(windows[target], all_entries, stored.start, before + count)
    return out


def _entries(window: Tensor, positions: range) -> Tensor:
    return window[torch.tensor(list(positions), dtype=torch.int64, device=window.device) % window.shape[0]]


def _store(window: Tensor, entries: Tensor, first: int, length: int) -> None:
    """Keep the last entries of a sequence of ``length`` tokens; ``entries`` are those from position ``first`` on."""
    kept = torch.arange(max(first, length - window.shape[0]), length, device=window.device)
    window[kept % window.shape[0]] = entries[kept - first].to(window.dtype)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    before: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """``q [L, Hq, D]`` stand at positions ``before`` on of ``keys`` and ``values [before + L, Hkv, D]``."""
    own = torch.arange(before, keys.shape[0], device=q.device)[:, None]
    other = torch.arange(keys.shape[0], device=q.device)
    visible = (other <= own) & (other > own - window)
    grouped = q.unflatten(1, (keys.shape[1], -1)).float()
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.float())
    if bias is not None:
        places = (own - other).clamp(0, window - 1)[:, None].expand(-1, q.shape[1], -1)
        scores += bias.float().gather(2, places).transpose(0, 1).view(scores.shape)
    scores = (scores * scale).masked_fill(~visible, -torch.inf).transpose(1, 2)  # [Hkv, L, group, K]
    weights = _softmax(scores.transpose(0, 1), sinks)
    return torch.einsum("qhgk,khd->qhgd", weights, values.float()).flatten(1, 2).to(q.dtype)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of ``scores [N, Hkv, group, K]``, with one more score per head that is left out."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float().reshape(-1, *scores.shape[1:3], 1).expand(scores.shape[0], -1, -1, -1)
    return torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
