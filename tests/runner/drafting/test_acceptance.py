"""Acceptance: which drafts count, and that what is emitted keeps the distribution of sampling without drafts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.whole import covering
from weft.messages import ScheduledRequest
from weft.ops.backend import Backend
from weft.ops.drafts import accept_drafts, right_drafts
from weft.ops.drafts.types import NO_DRAFT, AcceptanceRule
from weft.ops.sampling import SamplingFlags, apply_top_k_top_p_min_p_, filter_candidates, sample
from weft.runner.drafting.acceptance import Acceptance, accept, sampled_positions
from weft.scheduler.draft_planner import LOG_EVERY, AcceptanceLog, DraftPlanner

DRAWS = 100_000
CHI_SQUARE = {3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}
"""Quantile 1 - 1e-4 by degrees of freedom."""


def judged(token_ids: torch.Tensor, drafts: torch.Tensor, first: torch.Tensor) -> Acceptance:
    nothing = torch.zeros_like(token_ids)
    return accept(right_drafts(token_ids, drafts, nothing, nothing, AcceptanceRule())[1], first)


@pytest.mark.parametrize("seed", range(50))
def test_counts_the_leading_drafts_that_were_sampled(seed: int) -> None:
    rng = random.Random(seed)
    sampled, drafts, first, counted, accepted = [], [], [], [], []
    for _ in range(rng.randint(1, 6)):
        count = rng.randint(0, 5)
        first.append(len(sampled))
        tokens = [rng.randrange(3) for _ in range(count + 1)]
        guesses = [rng.randrange(3) for _ in range(count)]
        right = next((i for i in range(count) if tokens[i] != guesses[i]), count)
        sampled += tokens
        drafts += [*guesses, NO_DRAFT]
        counted += [i <= right for i in range(count + 1)]
        accepted.append(right)
    found = judged(*(torch.tensor(values) for values in (sampled, drafts, first)))
    assert found.num_accepted.tolist() == accepted and found.counted.tolist() == counted
    assert found.last.tolist() == [f + a for f, a in zip(first, accepted, strict=True)]


def test_what_is_no_token_is_no_draft() -> None:
    """Sampling from NaN logits may return any number, also ``NO_DRAFT``, which means that no draft follows."""
    found = judged(torch.tensor([4, NO_DRAFT, NO_DRAFT]), torch.tensor([4, NO_DRAFT, NO_DRAFT]), torch.tensor([0, 2]))
    assert found.num_accepted.tolist() == [1, 0] and found.counted.all()


@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_equally_many_drafts_are_accepted_alike(query_len: int) -> None:
    torch.manual_seed(query_len)
    input_ids, sampled = torch.randint(0, 2, (2, 60 * query_len))
    drafts, nothing = input_ids.roll(-1), torch.zeros_like(sampled)
    drafts[query_len - 1 :: query_len] = NO_DRAFT
    expected = judged(sampled, drafts, torch.arange(0, 60 * query_len, query_len))
    last_token, num_rejected = torch.full((2, 60), 9).unbind(0)
    rows = torch.arange(60).flip(0).repeat_interleave(query_len)
    found = accept_drafts(
        sampled, input_ids, nothing, nothing, rows, query_len, AcceptanceRule(), last_token, num_rejected,
        backend=Backend.TORCH,
    )  # fmt: skip
    for name in ("num_accepted", "counted", "last"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.token_ids, sampled) and found.num_accepted.unique().numel() == query_len
    assert torch.equal(last_token.flip(0), sampled[found.last])
    assert torch.equal(num_rejected.flip(0), query_len - 1 - found.num_accepted)


@pytest.mark.parametrize("rate", [0.0, 0.8, 1.0])
def test_a_synthetic_rate_accepts_as_often(rate: float) -> None:
    """Whatever was sampled; what is accepted stands in its place."""
    sampled, drafts = torch.full((DRAWS,), 1), torch.tensor([2, NO_DRAFT]).repeat(DRAWS // 2)
    positions = torch.arange(DRAWS)
    rule = AcceptanceRule.of(rate, None)
    token_ids, is_right = right_drafts(sampled, drafts, torch.full((DRAWS,), 7), positions, rule)
    assert not is_right[1::2].any() and abs(float(is_right[::2].float().mean()) - rate) < 0.01
    assert torch.equal(token_ids, torch.where(is_right, drafts, sampled))


def test_the_log_explains_a_low_rate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("weft.scheduler.draft_planner.LOG_S", 0.0)
    caplog.set_level("INFO", "weft.scheduler.draft_planner")
    for accepted in (0, 3):
        log = AcceptanceLog("outputs repeat little")
        for _ in range(LOG_EVERY):
            log.count(4, accepted)
    low, high = caplog.messages
    assert low.startswith("drafts: 0% accepted, 1.00 tokens") and "few: outputs repeat little" in low
    assert high == "drafts: 75% accepted, 4.00 tokens per request and step"


def test_accepted_drafts_are_counted_by_position() -> None:
    planner: Any = SimpleNamespace(
        num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, accepted_per_position=[0, 0, 0], _log=Mock()
    )
    request: Any = SimpleNamespace(num_draft_tokens=0, num_accepted_tokens=0)
    for accepted in (2, 1, 0):
        DraftPlanner.verified(planner, request, 3, accepted)
    assert planner.accepted_per_position == [2, 1, 0]
    assert (planner.num_drafts, planner.num_draft_tokens, planner.num_accepted_tokens) == (3, 9, 3)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (9, 3)


def test_a_position_sees_only_the_drafts_before_it() -> None:
    plain = ScheduledRequest(3, 10, 1, [], 1, True)
    prefill = ScheduledRequest(4, 0, 8, [], 2, False)
    drafting = ScheduledRequest(5, 20, 3, [], 3, True, draft_token_ids=[7, 8])
    positions = sampled_positions([plain, prefill, drafting])
    assert [(p.row, p.start + p.num_tokens, p.draft_token_ids) for p in positions] == [
        (3, 11, []), (5, 21, []), (5, 22, [7]), (5, 23, [7, 8]),
    ]  # fmt: skip


OPTIONS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.5, 0, 1.0, 0.0),
    "hot": (1.7, 0, 1.0, 0.0),
    "top-k": (1.0, 4, 1.0, 0.0),
    "top-p": (1.0, 0, 0.8, 0.0),
    "min-p": (1.0, 0, 1.0, 0.2),
    "all": (0.8, 6, 0.95, 0.05),
}


@pytest.mark.parametrize(("draft", "option"), covering([0, 2, 6], OPTIONS, of=1))
def test_distribution(option: str, draft: int) -> None:
    """Each draw is a request with a seed of its own and one draft. The first token is distributed as without drafts.
    The draft is accepted with its probability. The token after an accepted draft follows the second row."""
    temperature, top_k, top_p, min_p = OPTIONS[option]
    logits = torch.tensor([[2.0, 1.4, 1.2, 0.3, 0.0, -0.5, -1.0, -1.5], [0.0, 0.5, -0.7, 1.0, 0.2, -2.0, 0.4, 1.1]])
    probabilities = _filtered(logits, temperature, top_k, top_p, min_p)
    seeds = torch.arange(DRAWS) * 2654435761 + 12345
    tokens, _ = sample(
        logits.repeat(DRAWS, 1),
        *(torch.full((2 * DRAWS,), value) for value in (temperature, top_k, top_p, min_p)),
        seeds.repeat_interleave(2),
        torch.tensor([5, 6]).repeat(DRAWS),
        SamplingFlags(False, filter_candidates([top_k], [top_p], 8), min_p > 0),
        backend=Backend.TORCH,
    )
    acceptance = judged(tokens, torch.tensor([draft, NO_DRAFT]).repeat(DRAWS), 2 * torch.arange(DRAWS))
    first, second = tokens.view(DRAWS, 2).unbind(1)
    accepted = acceptance.num_accepted == 1
    assert torch.equal(accepted, first == draft)
    assert _chi_square(first, probabilities[0]) < _limit(probabilities[0])
    if float(probabilities[0][draft]) > 0:
        assert _chi_square(second[accepted], probabilities[1]) < _limit(probabilities[1])
    else:
        assert not accepted.any()
    without = probabilities[0].clone()
    without[draft] = 0  # rejection: from p without the draft, renormalised
    assert _chi_square(first[~accepted], without / without.sum()) < _limit(without)


def _filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    rows = logits.shape[0]
    scaled = apply_top_k_top_p_min_p_(
        logits / temperature,
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p) if min_p else None,
        candidates=filter_candidates([top_k], [top_p], logits.shape[1]),
    )
    return scaled.softmax(-1)


def _chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert float(counts[expected == 0].sum()) == 0, "a filtered token was emitted"
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def _limit(probabilities: torch.Tensor) -> float:
    freedom = int((probabilities > 0).sum()) - 1
    return CHI_SQUARE.get(freedom, 18.5)
