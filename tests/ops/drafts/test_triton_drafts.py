"""The kernels around verifications and of n-gram drafts against their torch references, bit for bit, on the GPU or
under the interpreter. The rule of n-gram drafts is tested against a search by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.drafts import NgramRule, accept_drafts, follow_step, ngram_drafts, places_ahead
from weft.ops.drafts.types import FROM_LAST_TOKEN, NO_DRAFT, AcceptanceRule, PageTable, RowState

ROWS, PAGE, PAGES = 9, 4, 12
CASES = [(1, 2), (5, 2), (7, 4), (3, 1), (4, 17)]
"""Sequences, tokens of each."""


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype).to(DEVICE)


def row_state(num_drafts: int) -> RowState:
    rejected = integers(0, max(num_drafts, 1), ROWS)
    return RowState(integers(3, 9, ROWS), integers(3, 9, ROWS, num_drafts), rejected)


def assert_equal(found: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"result {i}: {a} is not {b}"


def copies(state: RowState) -> tuple[RowState, RowState]:
    return RowState(*(t.clone() for t in state)), RowState(*(t.clone() for t in state))


@pytest.mark.parametrize(("num_seqs", "query_len"), CASES)
def test_follow_step(num_seqs: int, query_len: int) -> None:
    state, tokens = row_state(16), num_seqs * query_len
    state.num_rejected.clamp_(max=query_len - 1)
    rows = torch.randperm(ROWS)[:num_seqs].to(DEVICE)
    lengths = integers(2 * query_len, PAGE * PAGES, num_seqs, dtype=torch.int32)
    ids = integers(3, 9, tokens).index_fill_(0, torch.arange(0, tokens, query_len).to(DEVICE), FROM_LAST_TOKEN)
    arguments = (
        ids, integers(50, 90, tokens), integers(20, 30, tokens), lengths, rows,
        integers(0, 2, num_seqs), integers(1, 99, num_seqs, query_len, dtype=torch.int32),
        PageTable(integers(1, 50, ROWS, PAGES + 10, dtype=torch.int32), PAGE), state,
    )  # fmt: skip
    want, found = (follow_step(*arguments, backend=backend) for backend in (Backend.TORCH, Backend.TRITON))
    assert_equal(found, want)
    assert FROM_LAST_TOKEN not in want.input_ids


@pytest.mark.parametrize("never", [None, [4], [4, 6, 8]])
@pytest.mark.parametrize("rate", [None, 0.6])
@pytest.mark.parametrize(("num_seqs", "query_len"), CASES)
def test_accept_drafts(num_seqs: int, query_len: int, rate: float | None, never: list[int] | None) -> None:
    tokens = num_seqs * query_len
    rule = AcceptanceRule.of(rate, None if never is None else torch.tensor(never, device=DEVICE))
    rows = torch.randperm(ROWS)[:num_seqs].repeat_interleave(query_len).to(DEVICE)
    sampled, ids = integers(3, 5, tokens), integers(3, 5, tokens)
    seeds, positions = integers(-(2**63), 2**63 - 1, tokens), integers(0, 2**20, tokens)
    state, other = copies(row_state(query_len))
    results = [
        accept_drafts(
            sampled, ids, seeds, positions, rows, query_len, rule, s.last_token, s.num_rejected, backend=backend
        )
        for s, backend in ((state, Backend.TORCH), (other, Backend.TRITON))
    ]
    assert_equal(results[1], results[0])
    assert_equal(other, state)


@pytest.mark.parametrize(("num_seqs", "num_ahead"), [(1, 1), (5, 3), (3, 15)])
def test_places_ahead(num_seqs: int, num_ahead: int) -> None:
    query_len = num_ahead + 1
    ends = (torch.arange(1, num_seqs + 1, device=DEVICE) * query_len).int()
    last = ends - 1 - integers(0, query_len, num_seqs).int()
    lengths = integers(query_len, PAGE * PAGES, num_seqs, dtype=torch.int32)
    table = PageTable(integers(1, 50, num_seqs, PAGES, dtype=torch.int32), PAGE)
    positions = integers(0, PAGE * PAGES, num_seqs * query_len)
    arguments = (last.long(), ends, positions, lengths, table, num_ahead, PAGE * PAGES)
    want, found = (places_ahead(*arguments, backend=backend) for backend in (Backend.TORCH, Backend.TRITON))
    assert_equal(found, want)


def by_hand(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    for length in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):  # latest first
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                longer = list(tokens)
                for i in range(count):
                    longer.append(longer[end + i])
                return longer[len(tokens) :]
    return [NO_DRAFT] * count


def drafted(
    texts: list[list[int]], sampled: list[list[int]], accepted: list[int] | None, low: int, high: int, count: int,
    backend: Backend, *, width: int = 64, always: bool = False, held: int = 6,
) -> tuple[list[list[int]], RowState, Tensor]:  # fmt: skip
    """Drafts after ``sampled`` was sampled behind ``texts``, of which all but the first of ``sampled``'s tokens are
    drafts that were run; the rows and their history."""
    query_len, rows = len(sampled[0]), torch.arange(len(texts), 0, -1, device=DEVICE)
    history = torch.zeros(ROWS, width, dtype=torch.int32, device=DEVICE)
    for row, text in zip(rows.tolist(), texts, strict=True):
        history[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) + query_len - 1 for text in texts], dtype=torch.int32, device=DEVICE)
    state = RowState(*(torch.full_like(t, 77) for t in row_state(held)))
    num_accepted = None if accepted is None else torch.tensor(accepted, device=DEVICE)
    tokens = torch.tensor(sampled, device=DEVICE).flatten()
    rule = NgramRule(count, low, high, always)
    found = ngram_drafts(tokens, num_accepted, rows, lengths, history, state, rule, backend=backend)
    return found.tolist(), state, history


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
@pytest.mark.parametrize("seed", range(12))
def test_ngram_drafts(seed: int, backend: Backend) -> None:
    """Drafts follow the latest occurrence of the longest suffix. Only accepted tokens are part of the text."""
    rng = random.Random(seed)
    kinds, low = rng.choice([1, 2, 4]), rng.randint(1, 3)
    high, query_len, count = low + rng.randint(0, 3), rng.choice([1, 3, 5]), rng.choice([0, 1, 5])
    texts = [[rng.randrange(kinds) for _ in range(rng.randint(1, 40))] for _ in range(ROWS - 1)]
    sampled = [[rng.randrange(kinds) for _ in range(query_len)] for _ in texts]
    accepted = None if query_len == 1 else [rng.randrange(query_len) for _ in texts]
    found, state, history = drafted(texts, sampled, accepted, low, high, count, backend)
    for i, (text, more) in enumerate(zip(texts, sampled, strict=True)):
        row, right = len(texts) - i, accepted[i] if accepted is not None else query_len - 1
        known = text + more[: right + 1]
        assert history[row, : len(known)].tolist() == known
        assert found[i] == (by_hand(known, low, high, count) if count else [])
        assert state.num_rejected[row] == query_len - 1 - right
        if found[i] and found[i][0] != NO_DRAFT:
            assert state.drafts[row, :count].tolist() == found[i]
        elif count:  # any tokens of the text
            assert set(state.drafts[row, :count].tolist()) <= set(known)
        assert (state.drafts[row, count:] == 77).all()


def test_long_texts_and_kept_nothing() -> None:
    """Texts of several blocks; a row that holds no drafts; drafts although nothing was found."""
    text = [*range(5000), 7, 8, 9]
    arguments = ([text, text[:-3]], [[10], [3]], None, 2, 4, 3)
    for backend in (Backend.TORCH, Backend.TRITON):
        found, state, _ = drafted(*arguments, backend, width=5010, held=0)
        assert found == [[11, 12, 13], [NO_DRAFT] * 3] and (state.num_rejected == 77).all()
        found, state, _ = drafted(*arguments, backend, width=5010, always=True)
        assert found[0] == [11, 12, 13] and NO_DRAFT not in found[1] and state.drafts[1, :3].tolist() == found[1]


def test_the_longest_suffix_goes_before_the_latest() -> None:
    text = [1, 2, 3, 9, 8, 7, 2, 3, 4, 4, 1, 2]
    for backend in (Backend.TORCH, Backend.TRITON):
        assert drafted([text], [[3]], None, 1, 3, 2, backend)[0] == [[9, 8]]
        assert drafted([text], [[3]], None, 1, 2, 2, backend)[0] == [[4, 4]]
        assert drafted([[1, 2, 3]], [[4]], None, 1, 3, 2, backend)[0] == [[NO_DRAFT] * 2]
