"""Operations before and after the forward pass of a step that verifies drafts, one launch each, and n-gram drafts.

Job: ``follow_step`` moves a step back by the drafts that the previous step rejected. ``accept_drafts`` accepts the
drafts that the model sampled. ``places_ahead`` lays out the passes in which the draft head drafts further tokens.
``ngram_drafts`` keeps the tokens of every row on the device, finds the latest earlier occurrence of the longest suffix
of a row, and drafts the tokens after it (prompt lookup; A. Saxena, "Prompt Lookup Decoding"). Owns: the arithmetic.
Does not know: batches, requests, models.

S sequences verify ``Q - 1`` drafts each, so they bring Q tokens, side by side on the flat axis of ``T = S * Q`` tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from weft.ops.backend import Backend, with_kernel
from weft.ops.drafts.types import (
    FACTORS,
    FROM_LAST_TOKEN,
    MASK_31,
    NO_DRAFT,
    AcceptanceRule,
    AcceptedDrafts,
    FollowedStep,
    PageTable,
    PlacesAhead,
    RowState,
)
from weft.ops.rows import whole


@with_kernel("weft.ops.drafts.kernels", whole)
def follow_step(
    input_ids: Tensor,
    positions: Tensor,
    sample_positions: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    follows: Tensor,
    slots: Tensor,
    page_table: PageTable,
    state: RowState,
    *,
    backend: Backend,
) -> FollowedStep:
    """Correct a step of verifications. The host may have laid it out as if all drafts of the previous step were
    accepted.

    Args:
        input_ids: ``[T]`` int64; ``FROM_LAST_TOKEN`` stands for the row's last token.
        positions, sample_positions: ``[T]`` int64, of the tokens (rotary), and of what is sampled after them.
        seq_lens: ``[S]`` int32, with the step's tokens.
        rows: ``[S]`` int64.
        follows: ``[S]`` int64, 1 if the sequence follows its previous step. It then takes its tokens from its row and
            begins earlier by the rejected drafts. With 0 the layout stays.
        slots: ``[S, Q]`` int32, where the states after each token go. A step that follows stores into the slots of the
            previous step. It reads the slot that holds the state after the last accepted token.
        page_table: of all R rows.
        state: of the rows.
    """
    query_len = slots.shape[1]
    rejected = state.num_rejected.index_select(0, rows) * follows
    behind, is_following = rejected[:, None], follows[:, None] > 0
    last = state.last_token.index_select(0, rows)[:, None]
    held = torch.cat([last, state.drafts.index_select(0, rows)[:, : query_len - 1]], dim=1)
    given = input_ids.view(-1, query_len)
    lengths = seq_lens - rejected.int()
    # While a graph is captured, the step buffers may hold padding for fewer drafts, shorter than a sequence's tokens.
    places = (torch.arange(-query_len, 0, device=rows.device) + lengths[:, None]).clamp(min=0)
    pages = page_table.pages.index_select(0, rows).gather(1, places // page_table.page_size)
    return FollowedStep(
        torch.where(is_following, held, torch.where(given == FROM_LAST_TOKEN, last, given)).flatten(),
        (positions.view(-1, query_len) - behind).flatten(),
        (sample_positions.view(-1, query_len) - behind).flatten(),
        (pages * page_table.page_size + places % page_table.page_size).flatten(),
        lengths,
        slots.gather(1, query_len - 1 - behind)[:, 0],
    )


def _random_31(seeds: Tensor, positions: Tensor) -> Tensor:
    """``[M]`` int64, random numbers below 2**31 by seed and position. Few operations mix these numbers, because they
    serve measurements and must take little time. Texts use the random numbers of ``ops/sampling``."""
    mixed = torch.add(seeds, positions, alpha=FACTORS[0])
    mixed = (mixed ^ mixed >> 29) * FACTORS[1]
    return (mixed ^ mixed >> 32) & MASK_31


def right_drafts(
    token_ids: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor, rule: AcceptanceRule
) -> tuple[Tensor, Tensor]:
    """The sequences' tokens ``[M]``, and which drafts are right, ``[M]`` bool; device work only.

    Args:
        token_ids: ``[M]`` int64, what was sampled.
        drafts: ``[M]`` int64, the draft that follows each position; ``NO_DRAFT`` where none does.
        seeds, positions: ``[M]`` int64, of the random numbers.
    """
    is_draft = drafts != NO_DRAFT
    if rule.never is not None:
        is_draft &= (drafts[:, None] != rule.never).all(1)
    if rule.bound is None:
        return token_ids, is_draft & (token_ids == drafts)  # NaN logits may sample anything, NO_DRAFT too
    is_right = is_draft & (_random_31(seeds, positions) < rule.bound)
    return torch.where(is_right, drafts, token_ids), is_right


@with_kernel("weft.ops.drafts.kernels", whole)
def accept_drafts(
    token_ids: Tensor,
    input_ids: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    query_len: int,
    rule: AcceptanceRule,
    last_token: Tensor,
    num_rejected: Tensor,
    *,
    backend: Backend,
) -> AcceptedDrafts:
    """Accept each sequence's drafts up to the first wrong one, and store the result in the sequence's row.

    Args:
        token_ids: ``[T]`` int64, what was sampled after every token.
        input_ids: ``[T]`` int64, what was run: the last token and ``query_len - 1`` drafts of every sequence.
        seeds, positions: ``[T]`` int64, of the random numbers.
        rows: ``[T]`` int64, those of the sequences, for every token.
        last_token, num_rejected: ``[R]`` int64, of all rows; written.
    """
    drafts = input_ids.roll(-1)
    drafts[query_len - 1 :: query_len] = NO_DRAFT
    tokens, is_right = right_drafts(token_ids, drafts, seeds, positions, rule)
    num_accepted = is_right.view(-1, query_len)[:, :-1].long().cumprod(1).sum(1)
    places = torch.arange(query_len, device=rows.device)
    last = torch.arange(0, len(tokens), query_len, device=rows.device) + num_accepted
    of_sequences = rows[::query_len]
    last_token.index_copy_(0, of_sequences, tokens.index_select(0, last))
    num_rejected.index_copy_(0, of_sequences, query_len - 1 - num_accepted)
    return AcceptedDrafts(tokens, (places <= num_accepted[:, None]).flatten(), num_accepted, last)


@with_kernel("weft.ops.drafts.kernels", whole)
def places_ahead(
    last: Tensor,
    ends: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    page_table: PageTable,
    num_ahead: int,
    max_len: int,
    *,
    backend: Backend,
) -> PlacesAhead:
    """Compute the places of the tokens 1, 2, … ``num_ahead`` after the last accepted token of N sequences.

    Args:
        last: ``[N]`` int64, index of that token on the flat axis.
        ends: ``[N]`` int32, index behind the sequence's last token there.
        positions: ``[T]`` int64, rotary positions; with images in the prompt they are not the places in the sequence.
        seq_lens: ``[N]`` int32, with all tokens of the step.
        page_table: of the N sequences.
        max_len: tokens beyond this many are placed at the last place.
    """
    ahead = torch.arange(1, num_ahead + 1, device=last.device)[:, None]
    places = (seq_lens - ends + last + ahead).clamp(min=0, max=max_len - 1)
    pages = page_table.pages.gather(1, (places // page_table.page_size).T).T.long()
    return PlacesAhead(
        (positions[last] + ahead).clamp(max=max_len - 1),
        pages * page_table.page_size + places % page_table.page_size,
        (places + 1).int(),
    )


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


class NgramRule(NamedTuple):
    """How n-gram drafts are found.

    Attributes:
        num_drafts: tokens to draft. If the occurrence is nearer to the end, the tokens after it repeat.
        low, high: shortest and longest suffix that counts.
        always: draft some tokens of the row if nothing is found (to measure).
    """

    num_drafts: int
    low: int
    high: int
    always: bool


@with_kernel("weft.ops.drafts.ngram", whole)
def ngram_drafts(
    token_ids: Tensor,
    num_accepted: Tensor | None,
    rows: Tensor,
    seq_lens: Tensor,
    history: Tensor,
    state: RowState,
    rule: NgramRule,
    *,
    backend: Backend,
) -> Tensor:
    """Append the tokens that a step sampled to its S rows, and draft the next tokens.

    Args:
        token_ids: ``[S * Q]`` int64, sampled after each of the Q tokens that every sequence has run.
        num_accepted: ``[S]`` int64, of each sequence's tokens the first ``num_accepted + 1`` count; None: all.
        rows: ``[S]`` int64.
        seq_lens: ``[S]`` int32, lengths with all Q tokens, without what was sampled after the last.
        history: ``[R, L]`` int32, the tokens of all rows, each from the start of its prompt; written.
        state: of the rows; ``num_rejected`` and the first ``num_drafts`` of ``drafts`` are written if it has drafts,
            tokens also where nothing was found.

    Returns:
        ``[S, num_drafts]`` int64, ``NO_DRAFT`` in the rows of sequences in which nothing was found.
    """
    num_drafts, low, high, always = rule
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
