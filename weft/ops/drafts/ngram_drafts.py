"""N-gram drafts (prompt lookup) on the device.

Job: keep the tokens of every row on the device, find the latest earlier occurrence of the longest suffix of what a row
holds, and draft what came after it (prompt lookup; A. Saxena, "Prompt Lookup Decoding"). Owns: the rule. Does not know:
requests, what becomes of drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.drafts.types import NO_DRAFT, RowState


def _latest_match(history: Tensor, lengths: Tensor, low: int, high: int) -> Tensor:
    """``[S]`` int64: where the latest earlier occurrence of the longest suffix of ``history[s, : lengths[s]]`` ends, -1
    if no suffix of ``low`` tokens occurs earlier. Suffixes of more than ``high`` tokens count as such of ``high``."""
    width = history.shape[1]
    end = torch.arange(width, device=history.device)
    alike = (end < lengths[:, None] - 1).expand(history.shape)
    matched = torch.zeros_like(history)
    for back in range(high):
        token = history.gather(1, (lengths - 1 - back).clamp(min=0)[:, None])
        shifted = history.gather(1, (end - back).clamp(min=0).expand(history.shape))
        alike = alike & (end >= back) & (shifted == token)
        matched = matched + alike
    score, place = torch.where(matched >= low, matched.long() * width + end, NO_DRAFT).max(1)
    return torch.where(score >= 0, place, NO_DRAFT)


@with_kernel("weft.ops.drafts.ngram")
def ngram_drafts(
    token_ids: Tensor,
    num_accepted: Tensor | None,
    rows: Tensor,
    seq_lens: Tensor,
    history: Tensor,
    state: RowState,
    num_drafts: int,
    low: int,
    high: int,
    always: bool,
    *,
    backend: Backend,
) -> Tensor:
    """Add the tokens that a step sampled to those of its S rows, and draft what may follow.

    Args:
        token_ids: ``[S * Q]`` int64, sampled after each of the Q tokens that every sequence has run.
        num_accepted: ``[S]`` int64, of each sequence's tokens the first ``num_accepted + 1`` count; None: all.
        rows: ``[S]`` int64.
        seq_lens: ``[S]`` int32, lengths with all Q tokens, without what was sampled after the last.
        history: ``[R, L]`` int32, the tokens of all rows, each from the start of its prompt; written.
        state: of the rows; ``num_rejected`` and the first ``num_drafts`` of ``drafts`` are written if it has drafts,
            tokens also where nothing was found.
        num_drafts: tokens to draft. Where the occurrence is nearer to the end than that, what follows it repeats.
        low, high: shortest and longest suffix that counts.
        always: where nothing is found, any tokens of the row are drafts, to measure.

    Returns:
        ``[S, num_drafts]`` int64, ``NO_DRAFT`` in the rows of sequences in which nothing was found.
    """
    num_seqs = len(rows)
    sampled = token_ids.view(num_seqs, -1)
    query_len = sampled.shape[1]
    accepted = num_accepted if num_accepted is not None else torch.full_like(rows, query_len - 1)
    # While a graph is captured, the step buffers may hold padding for fewer drafts, shorter than a sequence's tokens.
    first = (seq_lens.long() - query_len + 1).clamp(min=0)
    places = first[:, None] + torch.arange(query_len, device=rows.device)
    # Tokens behind the last one that counts lie behind the end, and are overwritten.
    history.index_put_((rows[:, None].expand_as(sampled), places), sampled.to(history.dtype))
    if state.drafts.shape[1]:
        state.num_rejected.index_copy_(0, rows, query_len - 1 - accepted)
    if not num_drafts:
        return rows.new_empty(num_seqs, 0)
    lengths = first + 1 + accepted
    known = history.index_select(0, rows)
    match = _latest_match(known, lengths, low, high)[:, None]
    step, lengths = torch.arange(num_drafts, device=rows.device), lengths[:, None]
    start = torch.where(match >= 0, match + 1, (11 * lengths * lengths >> 5) % lengths)
    found = known.gather(1, start + step % (lengths - start)).long()
    if state.drafts.shape[1]:
        state.drafts[:, :num_drafts].index_copy_(0, rows, found)
    return found if always else torch.where(match >= 0, found, NO_DRAFT)
