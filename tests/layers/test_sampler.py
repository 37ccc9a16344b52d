"""The sampler: every part that a row can ask for, alone and together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from weft.layers.sampler import (
    BlockedTokens,
    LogitBias,
    Penalties,
    Sampler,
    SamplingMetadata,
    logprobs_of,
    processed_logits,
)
from weft.ops.backend import Backend

VOCAB = 65
sampler = Sampler(Backend.TORCH)


def batch(n: int, temperature: float = 0.0, **parts: Any) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=torch.full((n,), temperature),
        top_k=torch.zeros(n, dtype=torch.long),
        top_p=torch.ones(n),
        min_p=torch.zeros(n),
        seeds=torch.arange(n),
        positions=torch.zeros(n, dtype=torch.long),
        all_greedy=temperature == 0,
        **parts,
    )


def logits(n: int) -> Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(n)) * 2


def neutral_penalties(n: int) -> Penalties:
    return Penalties(
        torch.zeros(n),
        torch.zeros(n),
        torch.ones(n),
        torch.zeros(n, VOCAB, dtype=torch.int32),
        torch.zeros(n, VOCAB, dtype=torch.bool),
    )


def test_greedy_without_extras() -> None:
    x = logits(3)
    out = sampler(x.bfloat16(), batch(3))
    assert out.token_ids.dtype == torch.int64
    assert torch.equal(out.token_ids, x.bfloat16().float().argmax(-1))
    assert not out.nan_rows.any()


def test_each_edit_reaches_its_row_alone() -> None:
    x = logits(5)
    best = x.argmax(-1)
    before = x.clone()
    allowed = torch.ones(5, VOCAB, dtype=torch.bool)
    allowed[0] = False
    allowed[0, 40] = True
    parts = {
        "allowed": allowed,
        "blocked": BlockedTokens(torch.tensor([1]), best[1:2], torch.tensor([True])),
        "bias": LogitBias(torch.tensor([2, 2]), torch.tensor([7, int(best[2])]), torch.tensor([100.0, -1.0])),
        "penalties": replace(neutral_penalties(5), presence=torch.tensor([0.0, 0, 0, 2.0, 0])),
    }
    parts["penalties"].output_counts[3, best[3]] = 1
    x[3, best[3]] = x[3].topk(2).values[1] + 1.0  # within reach of the penalty
    before[3] = x[3]
    got = sampler(x, batch(5, **parts)).token_ids
    assert torch.equal(x, before), "the logits given are not modified"
    assert got[0] == 40
    assert got[1] == x[1].topk(2).indices[1]
    assert got[2] == 7
    assert got[3] == x[3].topk(2).indices[1]
    assert got[4] == best[4]


def test_a_plain_row_gives_the_same_token_beside_rows_with_every_option() -> None:
    x = logits(40)
    plain = sampler(x, batch(40, temperature=0.9)).token_ids
    top_p, top_k, min_p = torch.ones(40), torch.zeros(40, dtype=torch.long), torch.zeros(40)
    top_p[1::2], top_k[3::4], min_p[5::8] = 0.5, 3, 0.3
    temperature = torch.full((40,), 0.9)
    temperature[7::8] = 0.0
    penalties = neutral_penalties(40)
    penalties.repetition[1::2] = 1.8
    penalties.prompt_mask.copy_(torch.rand(40, VOCAB) < 0.5)
    allowed = torch.ones(40, VOCAB, dtype=torch.bool)
    allowed[1, :60] = False
    crowded = replace(
        batch(40, temperature=0.9),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        candidates=VOCAB,
        uses_min_p=True,
        penalties=penalties,
        allowed=allowed,
        bias=LogitBias(torch.tensor([1]), torch.tensor([3]), torch.tensor([5.0])),
        blocked=BlockedTokens(torch.tensor([1, 3]), torch.tensor([61, 9]), torch.tensor([True, True])),
    )
    assert torch.equal(sampler(x, crowded).token_ids[::2], plain[::2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_rows_are_named_and_harm_no_other(bad: float) -> None:
    x = logits(4)
    clean = sampler(x, batch(4, temperature=1.0)).token_ids
    x[2, 11] = bad
    for temperature in (0.0, 1.0):
        out = sampler(x, batch(4, temperature=temperature))
        assert out.nan_rows.tolist() == [False, False, True, False]
        assert 0 <= int(out.token_ids[2]) < VOCAB
    assert torch.equal(out.token_ids[[0, 1, 3]], clean[[0, 1, 3]])


def test_a_row_with_nothing_left_to_draw_is_named() -> None:
    allowed = torch.ones(2, VOCAB, dtype=torch.bool)
    allowed[1] = False
    out = sampler(logits(2), batch(2, temperature=1.0, allowed=allowed))
    assert out.nan_rows.tolist() == [False, True]
    assert 0 <= int(out.token_ids[1]) < VOCAB


def test_logprobs_are_of_the_raw_distribution() -> None:
    x = logits(3)
    best = x.argmax(-1)
    out = sampler(x, batch(3, blocked=BlockedTokens(torch.arange(3), best, torch.ones(3, dtype=torch.bool))))
    scores = x.log_softmax(-1)
    order = x.argsort(-1, descending=True)
    assert torch.equal(out.token_ids, order[:, 1])
    logprobs = logprobs_of(x, out.token_ids, 4)
    assert torch.equal(logprobs.token_ids, torch.cat([order[:, 1:2], order[:, :4]], dim=1))
    torch.testing.assert_close(logprobs.logprobs, scores.gather(1, logprobs.token_ids))
    assert logprobs.ranks.tolist() == [2, 2, 2]


def test_logprobs_of_given_tokens() -> None:
    x, tokens = logits(2).bfloat16(), torch.tensor([0, 64])
    scores = x.float().log_softmax(-1)
    got = logprobs_of(x, tokens, 0)
    assert got.token_ids.tolist() == [[0], [64]]
    torch.testing.assert_close(got.logprobs[:, 0], scores[[0, 1], tokens])
    assert got.ranks.tolist() == [1 + int((row > row[t]).sum()) for row, t in zip(scores, tokens, strict=True)]
    assert logprobs_of(x, tokens, VOCAB).token_ids.shape == (2, 1 + VOCAB)


def test_an_invariant_backend_samples_all_batches_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its rows ask for. Another way through the kernel would compare other sums."""
    ways: list[tuple[Any, ...]] = []

    def sample(x: Tensor, *given: Any, backend: Backend) -> Any:
        ways.append((x.dtype, *given[-1]))
        return x.argmax(-1), None

    monkeypatch.setattr("weft.layers.sampler.sample", sample)
    for each in (batch(2), batch(2, 0.5), replace(batch(2, 0.5), candidates=20, uses_min_p=True)):
        for backend in (Backend.INVARIANT_TRITON, Backend.TORCH):
            Sampler(backend)(logits(2).bfloat16(), each)
    assert set(ways[::2]) == {(torch.float32, False, VOCAB, True)} and len(set(ways[1::2])) == 3


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
def test_processed_logits_keep_what_was_sampled(backend: Backend) -> None:
    """Rows with each filter, with all, without one, and greedy; the filtered are gone, the others divided."""
    n = 6
    device = DEVICE if backend is Backend.TRITON else "cpu"
    x, options = logits(n).to(device), batch(n, temperature=0.5)
    metadata = replace(
        options,
        temperature=torch.tensor([0.0, 0.5, 0.5, 0.5, 2.0, 1.0], device=device),
        top_k=torch.tensor([3, 3, 0, 0, 9, 0], device=device),
        top_p=torch.tensor([0.5, 1.0, 0.6, 1.0, 0.7, 1.0], device=device),
        min_p=torch.tensor([0.5, 0.0, 0.0, 0.2, 0.1, 0.0], device=device),
        seeds=options.seeds.to(device),
        positions=options.positions.to(device),
        candidates=VOCAB,
        uses_min_p=True,
    )
    token_ids = Sampler(backend)(x, metadata).token_ids
    scores = processed_logits(x, metadata, token_ids)
    assert scores.gather(1, token_ids[:, None]).isfinite().all()
    kept = scores.isfinite()
    assert kept.sum(-1).tolist()[:2] == [VOCAB, 3] and kept[5].all() and kept[2:5].sum(-1).lt(VOCAB).all()
    scaled = x / torch.tensor([1.0, 0.5, 0.5, 0.5, 2.0, 1.0], device=device)[:, None]
    assert torch.equal(scores[kept], scaled[kept])
    dropped = kept.logical_not()[1].nonzero()[0]
    assert processed_logits(x[1:2], replace(metadata, **{
        name: getattr(metadata, name)[1:2] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    }), dropped)[0, dropped].isfinite()  # fmt: skip
