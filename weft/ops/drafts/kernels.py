"""The kernels of ``weft/ops/drafts``: one program per sequence, a few integers each.

All launches are ordinary, since the kernels write metadata that later kernels read before waiting
(``early_launch.py``).
"""

import torch
import triton.language as tl

from weft.ops.backend import launches
from weft.ops.drafts import accept_drafts, follow_step, places_ahead
from weft.ops.drafts.types import (
    FACTORS,
    FROM_LAST_TOKEN,
    MASK_31,
    NO_DRAFT,
    AcceptedDrafts,
    FollowedStep,
    PlacesAhead,
)
from weft.ops.triton.launch import jit, new_indices
from weft.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK = 32
"""Tokens of a sequence, at most (``config/speculation.py``: ``MAX_DRAFTS``). Sizes of a step are run-time arguments, so
that one kernel serves all."""
_FIRST, _SECOND = (tl.constexpr(factor) for factor in FACTORS)
_FROM_LAST_TOKEN, _NO_DRAFT, _MASK_31 = (tl.constexpr(value) for value in (FROM_LAST_TOKEN, NO_DRAFT, MASK_31))


@jit(do_not_specialize=["query_len"])
def _follow_kernel(
    input_ids, positions, sample_positions, seq_lens, rows, follows, slots, page_table,
    last_token, drafts, num_rejected,
    new_ids, new_positions, new_sample_positions, slot_mapping, new_seq_lens, state_slots, query_len,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, NUM_PAGES: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Compute one sequence. HELD: drafts that a row holds."""
    seq = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < query_len
    at = seq * query_len + place
    row = tl.load(rows + seq)
    following = tl.load(follows + seq) > 0
    rejected = tl.where(following, tl.load(num_rejected + row), 0)
    ids = tl.load(input_ids + at, mask=inside, other=0)
    held = tl.load(drafts + row * HELD + place - 1, mask=inside & (place > 0) & following, other=0)
    from_last = tl.where(following, place == 0, ids == _FROM_LAST_TOKEN)
    ids = tl.where(from_last, tl.load(last_token + row), tl.where(following, held, ids))
    tl.store(new_ids + at, ids, mask=inside)
    tl.store(new_positions + at, tl.load(positions + at, mask=inside, other=0) - rejected, mask=inside)
    sampled = tl.load(sample_positions + at, mask=inside, other=0)
    tl.store(new_sample_positions + at, sampled - rejected, mask=inside)
    length = tl.load(seq_lens + seq) - rejected
    tl.store(new_seq_lens + seq, length.to(tl.int32))
    where = tl.maximum(length - query_len + place, 0)
    page = tl.load(page_table + row * NUM_PAGES + where // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(slot_mapping + at, page * PAGE + where % PAGE, mask=inside)
    tl.store(state_slots + seq, tl.load(slots + seq * query_len + query_len - 1 - rejected))


@launches(follow_step, invariant={})
def follow_step_triton(
    input_ids, positions, sample_positions, seq_lens, rows, follows, slots, page_table, state
) -> FollowedStep:
    num_seqs, query_len = slots.shape
    pages, page_size = page_table
    assert slots.is_contiguous() and pages.is_contiguous() and state.drafts.is_contiguous()
    assert query_len <= _BLOCK
    flat = [new_indices(num_seqs * query_len, device=rows.device) for _ in range(4)]
    each = [new_indices(num_seqs, dtype=torch.int32, device=rows.device) for _ in range(2)]
    _follow_kernel[(num_seqs,)](
        input_ids, positions, sample_positions, seq_lens, rows, follows, slots, pages, *state, *flat, *each,
        query_len, BLOCK=_BLOCK, PAGE=page_size, NUM_PAGES=pages.shape[1], HELD=state.drafts.shape[1], num_warps=1,
    )  # fmt: skip
    return FollowedStep(*flat, *each)


@jit(do_not_specialize=["bound", "query_len"])
def _accept_kernel(
    token_ids, input_ids, seeds, positions, rows, never, last_token, num_rejected,
    new_token_ids, counted, num_accepted, last, bound, query_len,
    BLOCK: tl.constexpr, NUM_NEVER: tl.constexpr, NEVER_BLOCK: tl.constexpr, SYNTHETIC: tl.constexpr,
):  # fmt: skip
    """Compute one sequence."""
    seq = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < query_len
    at = seq * query_len + place
    token = tl.load(token_ids + at, mask=inside, other=0)
    is_draft = place < query_len - 1
    draft = tl.load(input_ids + at + 1, mask=is_draft, other=_NO_DRAFT)
    if NUM_NEVER > 0:
        entry = tl.arange(0, NEVER_BLOCK)
        ends = tl.load(never + entry, mask=entry < NUM_NEVER, other=_NO_DRAFT)
        is_draft = is_draft & (tl.sum((draft[:, None] == ends[None, :]).to(tl.int32), 1) == 0)
    if SYNTHETIC:
        mixed = tl.load(seeds + at, mask=inside, other=0) + tl.load(positions + at, mask=inside, other=0) * _FIRST
        mixed = (mixed ^ (mixed >> 29)) * _SECOND
        is_right = is_draft & (((mixed ^ (mixed >> 32)) & _MASK_31) < bound)
        token = tl.where(is_right, draft, token)
    else:
        is_right = is_draft & (token == draft)
    accepted = tl.min(tl.where(is_right, BLOCK, place), 0)
    tl.store(new_token_ids + at, token, mask=inside)
    tl.store(counted + at, place <= accepted, mask=inside)
    tl.store(num_accepted + seq, accepted.to(tl.int64))
    tl.store(last + seq, seq * query_len + accepted)
    row = tl.load(rows + seq * query_len)
    tl.store(last_token + row, tl.sum(tl.where(place == accepted, token, 0), 0))
    tl.store(num_rejected + row, (query_len - 1 - accepted).to(tl.int64))


@launches(accept_drafts, invariant={})
def accept_drafts_triton(
    token_ids, input_ids, seeds, positions, rows, query_len, rule, last_token, num_rejected
) -> AcceptedDrafts:
    num_tokens, device = len(token_ids), token_ids.device
    num_seqs, num_never = num_tokens // query_len, 0 if rule.never is None else len(rule.never)
    counted = torch.empty(num_tokens, dtype=torch.bool, device=device)
    each = [new_indices(num_seqs, device=device) for _ in range(2)]
    tokens = new_indices(num_tokens, device=device)
    assert query_len <= _BLOCK
    _accept_kernel[(num_seqs,)](
        token_ids, input_ids, seeds, positions, rows, token_ids if rule.never is None else rule.never, last_token,
        num_rejected, tokens, counted, *each, rule.bound or 0, query_len, BLOCK=_BLOCK, NUM_NEVER=num_never,
        NEVER_BLOCK=next_power_of_2(max(num_never, 1)), SYNTHETIC=rule.bound is not None, num_warps=1,
    )  # fmt: skip
    return AcceptedDrafts(tokens, counted, *each)


@jit(do_not_specialize=["num_ahead", "num_pages", "max_len", "stride"])
def _ahead_kernel(
    last, ends, positions, seq_lens, page_table, new_positions, slot_mapping, new_seq_lens,
    num_ahead, num_pages, max_len, stride,
    BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute one sequence, all tokens ahead."""
    seq = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    inside = step < num_ahead
    at = step * stride + seq
    index = tl.load(last + seq)
    position = tl.minimum(tl.load(positions + index) + 1 + step, max_len - 1)
    tl.store(new_positions + at, position, mask=inside)
    behind = tl.load(ends + seq) - index
    place = tl.minimum(tl.maximum(tl.load(seq_lens + seq) - behind + 1 + step, 0), max_len - 1)
    page = tl.load(page_table + seq * num_pages + place // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(slot_mapping + at, page * PAGE + place % PAGE, mask=inside)
    tl.store(new_seq_lens + at, (place + 1).to(tl.int32), mask=inside)


@launches(places_ahead, invariant={})
def places_ahead_triton(last, ends, positions, seq_lens, page_table, num_ahead, max_len) -> PlacesAhead:
    (pages, page_size), count, device = page_table, len(last), last.device
    assert pages.is_contiguous()
    assert num_ahead <= _BLOCK
    stride = 4 * cdiv(count, 4)  # every pass finds its part where kernels expect it, at a multiple of 16 bytes
    flat = [new_indices(num_ahead, stride, device=device) for _ in range(2)]
    lengths = new_indices(num_ahead, stride, dtype=torch.int32, device=device)
    _ahead_kernel[(count,)](
        last, ends, positions, seq_lens, pages, *flat, lengths, num_ahead, pages.shape[1], max_len, stride,
        BLOCK=_BLOCK, PAGE=page_size, num_warps=1,
    )  # fmt: skip
    return PlacesAhead(*(part[:, :count] for part in (*flat, lengths)))
