"""Random numbers, filters, penalties and the draw."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from weft.ops.backend import Backend
from weft.ops.sampling import (
    SamplingFlags,
    apply_penalties_,
    apply_top_k_top_p_min_p_,
    exponential_noise,
    filter_candidates,
    random_words,
    sample,
)

TORCH = Backend.TORCH
MASK = 0xFFFFFFFF
GOLDEN = [1225389201, 2558019834, 2847906090]  # seed 42, position 0, tokens 0 to 2


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def word(seed: int, position: int, token: int) -> int:
    """The generator's definition, in plain integers."""
    low, high = seed & MASK, seed >> 32 & MASK
    first, second = (mix(mix(mix(c ^ low) ^ high) ^ position) for c in (0x243F6A88, 0x85A308D3))
    return mix((mix(token) ^ first) * (second | 1) & MASK)


def uniforms(seeds: list[int], positions: list[int], vocab_size: int) -> Tensor:
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    return random_words(signed, torch.tensor(positions), vocab_size).long().bitwise_and(MASK).double() / 2**32


def draw(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Every row with the same parameters; seeds count up from 0."""
    n = logits.shape[0]
    tokens, _ = sample(
        logits,
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        torch.arange(n),
        torch.zeros(n, dtype=torch.long),
        SamplingFlags(temperature == 0, filter_candidates([top_k], [top_p], logits.shape[1]), min_p > 0),
        backend=TORCH,
    )
    return tokens


# --- random numbers --------------------------------------------------------------------------------------------------


def test_generator_equals_its_definition_in_plain_integers() -> None:
    seeds, positions = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF], [0, 1, 7, 4095, 2**20, 3]
    ours = (uniforms(seeds, positions, 70) * 2**32).long().tolist()
    assert ours == [[word(s, p, t) for t in range(70)] for s, p in zip(seeds, positions, strict=True)]


def test_generator_never_changes() -> None:
    """Golden values: a change here changes every seeded answer ever given."""
    assert [word(42, 0, t) for t in range(3)] == GOLDEN
    noise = exponential_noise(torch.tensor([42]), torch.tensor([0]), 3)
    expected = [-math.log1p(-(w + 0.5) / 2**32) for w in GOLDEN]
    torch.testing.assert_close(noise[0].double(), torch.tensor(expected, dtype=torch.double), rtol=1e-6, atol=0)


def test_noise_is_finite_positive_and_depends_on_its_row_alone() -> None:
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (64,)), torch.arange(64)
    noise = exponential_noise(seeds, positions, 1000)
    assert noise.dtype == torch.float32
    assert noise.min() > 0
    assert noise.max() < 16.7
    assert torch.equal(exponential_noise(seeds[9:10], positions[9:10], 1000)[0], noise[9])
    assert torch.equal(exponential_noise(seeds[9:10], positions[9:10], 130)[0], noise[9, :130])


def test_the_ends_of_the_range() -> None:
    """Two tokens whose words are 2**32 - 23 (rounds to 1 in float32) and 0."""
    highest = exponential_noise(torch.tensor([389]), torch.tensor([0]), 83_005)[0, 83_004]
    lowest = exponential_noise(torch.tensor([544]), torch.tensor([0]), 94_690)[0, 94_689]
    assert float(highest) == pytest.approx(24 * math.log(2))
    assert float(lowest) == pytest.approx(2.0**-33)


def test_numbers_are_uniform_along_every_axis() -> None:
    by_token = uniforms([5], [3], 200_000).flatten()
    by_position = uniforms([5] * 20_000, list(range(20_000)), 10).T.flatten()
    by_seed = uniforms(list(range(20_000)), [0] * 20_000, 10).T.flatten()
    by_high_seed = uniforms([s << 32 for s in range(20_000)], [0] * 20_000, 10).T.flatten()
    for numbers in (by_token, by_position, by_seed, by_high_seed):
        counts = torch.histc(numbers.float(), bins=256, min=0, max=1)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3


def test_neighbours_are_independent() -> None:
    """Pairs that differ in one step of token, position or seed fill the unit square evenly and do not correlate."""
    base = uniforms([77], [5], 100_001)[0]
    pairs = {
        "token": (base[:-1], base[1:]),
        "token, far": (base[: -(2**14)], base[2**14 :]),
        "position": (base, uniforms([77], [6], 100_001)[0]),
        "seed": (base, uniforms([78], [5], 100_001)[0]),
        "high seed": (base, uniforms([77 + 2**32], [5], 100_001)[0]),
        "seed and position": (base, uniforms([76], [6], 100_001)[0]),
        "seed and position swapped": (base, uniforms([5], [77], 100_001)[0]),
    }
    for name, (x, y) in pairs.items():
        assert abs(stats.pearsonr(x.numpy(), y.numpy()).statistic) < 4 / math.sqrt(len(x)), name
        cells = (x * 32).long() * 32 + (y * 32).long()
        assert stats.chisquare(torch.bincount(cells, minlength=1024).numpy()).pvalue > 1e-3, name


def test_bits_flip_evenly() -> None:
    """One flipped input bit flips each output bit half of the time (avalanche), whichever input it is in."""
    tokens = 4096
    base = random_words(torch.tensor([99]), torch.tensor([8]), tokens)[0]
    for seed, position in [(99 ^ 1, 8), (99 ^ 2**31, 8), (99 ^ 2**40, 8), (99, 9), (99, 8 ^ 2**10)]:
        other = random_words(torch.tensor([seed]), torch.tensor([position]), tokens)[0]
        flipped = torch.stack([((base ^ other) >> bit) & 1 for bit in range(32)]).double().mean(1)
        assert (flipped - 0.5).abs().max() < 5 * 0.5 / math.sqrt(tokens)


def test_no_two_tokens_of_a_row_share_a_number() -> None:
    assert random_words(torch.tensor([3]), torch.tensor([1]), 100_000).unique().numel() == 100_000


# --- the draw --------------------------------------------------------------------------------------------------------


def check_distribution(sampled: Tensor, probabilities: Tensor) -> None:
    counts = torch.bincount(sampled, minlength=probabilities.numel())
    assert (counts[probabilities == 0] == 0).all()
    kept = probabilities > 0
    expected = probabilities[kept].double()
    expected = expected / expected.sum() * sampled.numel()
    assert stats.chisquare(counts[kept].double().numpy(), expected.numpy()).pvalue > 1e-3


def reference_filter(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One row, distinct logits; the filters one after the other as written in the docs."""
    probabilities = logits.double().softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k > 0 else order
    total, mass, nucleus = sum(float(probabilities[i]) for i in kept), 0.0, []
    for i in kept:
        if mass >= top_p * total and top_p < 1:
            break
        nucleus.append(i)
        mass += float(probabilities[i])
    nucleus = [i for i in nucleus if probabilities[i] >= min_p * probabilities[order[0]]]
    mask = torch.zeros_like(probabilities, dtype=torch.bool)
    mask[nucleus] = True
    return mask


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(parameters: dict[str, float]) -> None:
    row = torch.randn(13, generator=torch.Generator().manual_seed(2)) * 1.5
    sampled = draw(row.expand(40_000, -1), **parameters)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **parameters}
    scaled = row / settings["temperature"]
    keep = reference_filter(scaled, int(settings["top_k"]), settings["top_p"], settings["min_p"])
    check_distribution(sampled, torch.where(keep, scaled.softmax(-1), 0.0))


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -torch.inf, -1.0, -1.0]])
    assert draw(logits, temperature=0.0).tolist() == [1, 0, 0]
    assert draw(logits, temperature=1e-6).tolist() == [1, 0, 0]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 50), -torch.inf)
    logits[:, 17] = -80.0
    assert (draw(logits) == 17).all()
    assert (draw(logits, temperature=0.01, top_k=3, top_p=0.5, min_p=0.1) == 17).all()


def test_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e4 - 1], [-3e38, -3e38, -2.9e38]]).repeat(50, 1)
    assert set(draw(logits)[::2].tolist()) <= {0, 2}
    assert (draw(logits, temperature=1e-4)[::2] == 0).all()


def random_rows(n: int, vocab: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(4)
    pick = lambda *options: torch.tensor(options)[torch.randint(len(options), (n,), generator=gen)]  # noqa: E731
    return {
        "logits": (torch.randn(n, vocab, generator=gen) * 3).bfloat16().float(),  # many equal logits
        "temperature": pick(0.0, 0.6, 1.0, 1.7),
        "top_k": pick(0, 0, 1, 20, 50, vocab + 5),
        "top_p": pick(1.0, 1.0, 0.9, 0.3),
        "min_p": pick(0.0, 0.0, 0.1),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (n,), generator=gen),
        "positions": torch.randint(0, 4000, (n,), generator=gen),
    }


def run(rows: dict[str, Tensor]) -> list[int]:
    candidates = filter_candidates(rows["top_k"].tolist(), rows["top_p"].tolist(), rows["logits"].shape[1])
    tokens, _ = sample(
        **rows,
        flags=SamplingFlags(
            all_greedy=bool((rows["temperature"] == 0).all()),
            candidates=candidates,
            uses_min_p=bool((rows["min_p"] > 0).any()),
        ),
        backend=TORCH,
    )
    return tokens.tolist()


def test_a_row_depends_on_nothing_else_in_the_batch() -> None:
    rows = random_rows(150, 600)
    together = run(rows)
    alone = [run({k: v[i : i + 1] for k, v in rows.items()})[0] for i in range(150)]
    assert together == alone
    order = torch.randperm(150)
    assert run({k: v[order] for k, v in rows.items()}) == [together[i] for i in order.tolist()]


def test_plain_rows_beside_small_top_k() -> None:
    """Only the 20 likeliest tokens are looked at, yet rows without a filter keep all of theirs."""
    rows = random_rows(150, 600)
    rows["temperature"] = torch.full((150,), 1.7)
    rows["top_k"][::2], rows["top_k"][1::2] = 0, 20
    rows["top_p"][::2] = 1.0
    rows["logits"] /= 4
    together = run(rows)
    assert together == [run({k: v[i : i + 1] for k, v in rows.items()})[0] for i in range(150)]


# --- filters and penalties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_equal_the_reference(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(5, 65, generator=torch.Generator().manual_seed(top_k)) * 2
    filtered = apply_top_k_top_p_min_p_(
        logits.clone(),
        torch.full((5,), top_k),
        torch.full((5,), top_p),
        torch.full((5,), min_p),
        candidates=filter_candidates([top_k], [top_p], 65),
    )
    for row, kept in zip(logits, filtered, strict=True):
        expected = reference_filter(row, top_k, top_p, min_p)
        assert torch.equal(kept > -torch.inf, expected)
        assert torch.equal(kept[expected], row[expected])


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 1), (0.75, 2), (0.875, 3), (0.5 + 2**-20, 2), (0.5 - 2**-20, 1)])
def test_a_share_that_is_reached_exactly_needs_no_further_token(top_p: float, count: int) -> None:
    """Shares of 1/2, 1/4, 1/8, 1/8, exact in binary: the smallest set whose share reaches top-p."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log2() * torch.tensor(2.0).log()
    logits = torch.where(torch.tensor([True] * 5), logits, 0.0)
    keep = apply_top_k_top_p_min_p_(logits.clone(), torch.tensor([0]), torch.tensor([top_p]), None, candidates=5)[0]
    assert int((keep > -torch.inf).sum()) == count


def test_equal_logits_at_the_border_stay_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = apply_top_k_top_p_min_p_(logits, torch.tensor([2]), torch.tensor([1.0]), None, candidates=2)
    assert (kept[0] > -torch.inf).tolist() == [False, True, True, True, False]


def test_candidates() -> None:
    assert filter_candidates([0, 0, 500], [1.0, 1.0, 1.0], 500) == 0
    assert filter_candidates([0, 20, 5], [1.0, 0.9, 1.0], 500) == 20
    assert filter_candidates([0, 20], [0.9, 0.9], 500) == 500
    assert filter_candidates([], [], 500) == 0


def test_penalties_equal_a_loop() -> None:
    n, vocab = 4, 30
    logits, counts = torch.randn(n, vocab) * 4, torch.randint(0, 4, (n, vocab), dtype=torch.int32)
    logits[0, 5] = -torch.inf
    prompt = torch.rand(n, vocab) < 0.3
    presence, frequency = torch.tensor([0.0, 0.5, -1.0, 2.0]), torch.tensor([0.0, -0.5, 1.0, 0.3])
    repetition = torch.tensor([1.0, 1.5, 0.7, 1.1])
    expected = logits.clone()
    for i in range(n):
        for t in range(vocab):
            if counts[i, t] > 0 or prompt[i, t]:
                x = expected[i, t]
                expected[i, t] = x / repetition[i] if x > 0 else x * repetition[i]
            expected[i, t] -= frequency[i] * counts[i, t]
            expected[i, t] -= presence[i] * (counts[i, t] > 0)
    ours = apply_penalties_(logits.clone(), presence, frequency, repetition, counts, prompt)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[0], logits[0]), "a row without penalties keeps its bits"
