"""The kernel of ``weft/ops/drafts``: one program per sequence walks through its tokens once.

It is launched as an ordinary kernel: what it writes is read by the next step's (``early_launch.py``).
"""

import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.drafts import ngram_drafts
from weft.ops.drafts.types import NO_DRAFT
from weft.ops.triton.launch import jit, new_indices

_BLOCK, _DRAFT_BLOCK = 2048, 32
"""Tokens of a text that are looked at together, and of a step, at most."""
_NO_DRAFT = tl.constexpr(NO_DRAFT)


@jit(do_not_specialize=["query_len", "num_drafts"])
def _ngram_kernel(
    token_ids, num_accepted, rows, seq_lens, history, drafts, num_rejected, out, query_len, num_drafts,
    WIDTH: tl.constexpr, HELD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ALL_COUNT: tl.constexpr,
    ALWAYS: tl.constexpr, BLOCK: tl.constexpr, DRAFT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one sequence. ``WIDTH`` is the width of the history, ``HELD`` the number of drafts that a row holds."""
    seq = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + seq)
    tokens = history + row * WIDTH
    if ALL_COUNT:
        accepted = (query_len - 1).to(tl.int64)
    else:
        accepted = tl.load(num_accepted + seq)
    first = tl.maximum(tl.load(seq_lens + seq).to(tl.int64) - query_len + 1, 0)
    place = tl.arange(0, DRAFT_BLOCK)
    inside = place < query_len
    sampled = tl.load(token_ids + seq * query_len + place, mask=inside, other=0)
    tl.store(tokens + first + place, sampled.to(tl.int32), mask=inside)
    if HELD > 0:
        tl.store(num_rejected + row, query_len - 1 - accepted)
    if num_drafts > 0:
        length = first + accepted + 1
        tl.debug_barrier()
        best = tl.full([], -1, tl.int64)
        for start in tl.range(0, length - 1, BLOCK):
            end = start + tl.arange(0, BLOCK)
            alike = end < length - 1
            matched = tl.zeros([BLOCK], dtype=tl.int64)
            for back in tl.range(0, HIGH):
                token = tl.load(tokens + tl.maximum(length - 1 - back, 0))
                alike = alike & (end >= back)
                alike = alike & (tl.load(tokens + end - back, mask=alike, other=0) == token)
                matched += alike.to(tl.int64)
            score = tl.where(matched >= LOW, matched * WIDTH + end, -1)
            best = tl.maximum(best, tl.max(score, 0))
        is_found = best >= 0
        begin = tl.where(is_found, best % WIDTH + 1, ((11 * length * length) >> 5) % length)
        wanted = place < num_drafts
        draft = tl.load(tokens + begin + place % (length - begin), mask=wanted, other=0).to(tl.int64)
        if HELD > 0:
            tl.store(drafts + row * HELD + place, draft, mask=wanted)
        if not ALWAYS:
            draft = tl.where(is_found, draft, _NO_DRAFT)
        tl.store(out + seq * num_drafts + place, draft, mask=wanted)


@launches(ngram_drafts, invariant={})
def ngram_drafts_triton(token_ids, num_accepted, rows, seq_lens, history, state, rule) -> Tensor:
    num_drafts, low, high, always = rule
    num_seqs, query_len = len(rows), len(token_ids) // len(rows)
    assert history.is_contiguous() and state.drafts.is_contiguous()
    assert max(query_len, num_drafts) <= _DRAFT_BLOCK
    out = new_indices(num_seqs, num_drafts, device=rows.device)
    accepted = token_ids if num_accepted is None else num_accepted
    _ngram_kernel[(num_seqs,)](
        token_ids, accepted, rows, seq_lens, history, state.drafts, state.num_rejected, out, query_len, num_drafts,
        WIDTH=history.shape[1], HELD=state.drafts.shape[1], LOW=low, HIGH=high, ALL_COUNT=num_accepted is None,
        ALWAYS=always, BLOCK=_BLOCK, DRAFT_BLOCK=_DRAFT_BLOCK, num_warps=8,
    )  # fmt: skip
    return out
