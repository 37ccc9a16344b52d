"""Sampling kernels against the torch reference, on the GPU or under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.ops.sampling.test_sampling import check_distribution, reference_filter
from weft.ops.sampling import SamplingFlags, exponential_noise, kernels, random_numbers, random_words, sample

import triton  # isort: skip
import triton.language as tl  # isort: skip

ON_GPU = DEVICE == "cuda"
VOCABS = [5, 1000, 4100] + [151936, 248320] * ON_GPU


@triton.jit
def _noise_kernel(seeds, positions, words, noise, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    mask = tokens < VOCAB
    hashed = random_numbers.random_words(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(words + row * VOCAB + tokens, hashed.to(tl.int32, bitcast=True), mask=mask)
    tl.store(noise + row * VOCAB + tokens, random_numbers.exponential(hashed), mask=mask)


def test_random_numbers_are_the_reference_s() -> None:
    """The words bit for bit, the exponential numbers to rounding."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (6,), device=DEVICE)
    seeds[:2] = torch.tensor([0, -1])
    positions = torch.tensor([0, 1, 2**31, 7, 100_000, 3], device=DEVICE)
    words = torch.empty(6, 3000, dtype=torch.int32, device=DEVICE)
    noise = torch.empty(6, 3000, device=DEVICE)
    _noise_kernel[(6,)](seeds, positions, words, noise, VOCAB=3000, BLOCK=4096)
    assert torch.equal(words, random_words(seeds, positions, 3000))
    torch.testing.assert_close(noise, exponential_noise(seeds, positions, 3000), rtol=2e-6, atol=0)


def arguments(num_rows: int, vocab: int, **values: list[float]) -> dict[str, Tensor]:
    """Per-row parameters; ``values`` are repeated over the rows."""
    defaults = {"temperature": [1.0], "top_k": [0], "top_p": [1.0], "min_p": [0.0]} | values
    dtypes = {"top_k": torch.int64}
    rows = {
        name: torch.tensor([v[i % len(v)] for i in range(num_rows)], dtype=dtypes.get(name, torch.float32))
        for name, v in defaults.items()
    }
    rows["seeds"] = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    rows["positions"] = torch.arange(num_rows)
    return {name: t.to(DEVICE) for name, t in rows.items()}


MIXTURES = {
    "greedy": {"temperature": [0.0]},
    "temperature": {"temperature": [1.0, 0.6, 2.0, 0.0]},
    "top-k": {"top_k": [1, 3, 50, 0, 10**9]},
    "top-p": {"top_p": [0.9, 0.1, 1.0, 0.999, 1e-6]},
    "min-p": {"min_p": [0.0, 0.1, 0.001, 1.0]},
    "all": {"temperature": [0.7, 0.0, 1.0], "top_k": [20, 0, 5, 1], "top_p": [0.8, 0.95], "min_p": [0.0, 0.05, 0.0]},
}


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_equals_reference(vocab: int, mixture: str) -> None:
    num_rows = 12 if ON_GPU else 5
    logits = torch.randn(num_rows, vocab, device=DEVICE) * 3
    logits[0, ::2] = -torch.inf
    logits[1, : vocab // 2] = logits[1, 0]  # ties
    logits[2, [vocab // 3, vocab - 1]] = 50.0  # in different blocks
    values = MIXTURES[mixture]
    given = arguments(num_rows, vocab, **values)
    candidates = vocab if values.keys() & {"top_k", "top_p"} else 0
    flags = SamplingFlags(mixture == "greedy", candidates, "min_p" in values)
    out = kernels.sample_triton(logits, **given, flags=flags)
    want = sample.reference(logits, **given, flags=flags)
    assert torch.equal(out[0], want[0]) and torch.equal(out[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_tokens_follow_the_distribution(filters: dict[str, float]) -> None:
    """The seeds are consecutive. ``test_sampling.py`` checks the same of the reference. The interpreter takes 50 ms for
    a row: on the CPU each token of the kernel is compared with the reference's token."""
    count, row = 40_000, torch.randn(13, generator=torch.Generator().manual_seed(2)) * 1.5
    given = arguments(count, 13, **{name: [value] for name, value in filters.items()})
    given["seeds"], given["positions"] = torch.arange(count, device=DEVICE), given["positions"] * 0
    flags = SamplingFlags(False, 0 if "min_p" in filters else 13, "min_p" in filters)
    sampled = kernels.sample_triton(row.expand(count, -1).to(DEVICE).contiguous(), **given, flags=flags)[0].cpu()
    keep = reference_filter(row, int(filters.get("top_k", 0)), filters.get("top_p", 1.0), filters.get("min_p", 0.0))
    check_distribution(sampled, torch.where(keep, row.softmax(-1), 0.0))


def test_the_best_token_need_not_have_the_smallest_bound() -> None:
    """Rows in which large random numbers decide: there the bound of ``_best_of_block`` lies far off."""
    given, logits = arguments(500, 8), torch.randn(500, 8, device=DEVICE) * 2
    noise, likelihood = exponential_noise(given["seeds"], given["positions"], 8), logits.softmax(-1)
    u = -torch.expm1(-noise)
    misled = (u * (1 + u * (0.5 + u * 0.3333)) / likelihood).argmin(-1) != (noise / likelihood).argmin(-1)
    rows = misled.nonzero()[:4, 0]
    assert len(rows) == 4
    given, logits = {name: values[rows] for name, values in given.items()}, logits[rows]
    flags = SamplingFlags(False, 0, False)
    want = sample.reference(logits, **given, flags=flags)[0]
    assert torch.equal(kernels.sample_triton(logits, **given, flags=flags)[0], want)


def kept(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Return a mask of the tokens that the kernel's threshold keeps."""
    thresholds = torch.empty(logits.shape[0], device=DEVICE)
    flags = SamplingFlags(False, logits.shape[1], True)
    kernels.sample_triton(logits, **given, flags=flags, thresholds=thresholds)
    return logits / given["temperature"][:, None] >= thresholds[:, None]


@pytest.mark.parametrize("k", [1, 2, 7, 40, 99])
def test_top_k_keeps_k(k: int) -> None:
    logits = torch.randn(4, 100, device=DEVICE)
    assert (kept(logits, arguments(4, 100, top_k=[k])).sum(1) == k).all()


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.9999])
def test_top_p_keeps_the_smallest_sufficient_set(p: float) -> None:
    logits = torch.randn(4, 333, device=DEVICE) * 4
    keep = kept(logits, arguments(4, 333, top_p=[p]))
    probabilities = logits.double().softmax(-1)
    mass = (probabilities * keep).sum(1)
    last = probabilities.masked_fill(~keep, 2.0).amin(1)
    assert (mass >= p - 1e-6).all() and (mass - last < p + 1e-6).all()


@pytest.mark.parametrize("filters", [{"top_k": [9000]}, {"top_p": [0.9]}, {"top_k": [9500], "top_p": [0.9]}])
def test_flat_rows_are_searched_as_a_whole(filters: dict[str, list[float]]) -> None:
    """The nucleus is far larger than the groups that are looked at first."""
    logits = torch.randn(2, 10_000, device=DEVICE) * 0.1
    given = arguments(2, 10_000, **filters)
    keep = kept(logits, given)
    if "top_p" not in filters:
        assert (keep.sum(1) == 9000).all()
        return
    probabilities = logits.double().softmax(-1)
    if "top_k" in filters:
        largest = probabilities.topk(9500, dim=-1)
        probabilities = torch.zeros_like(probabilities).scatter(1, largest.indices, largest.values)
        probabilities /= probabilities.sum(1, keepdim=True)
    mass = (probabilities * keep).sum(1)
    last = probabilities.masked_fill(~keep, 2.0).amin(1)
    assert (mass >= 0.9 - 1e-5).all() and (mass - last < 0.9 + 1e-5).all()


def test_flat_rows_are_sampled_as_a_whole() -> None:
    """Tokens that a low threshold keeps are sampled too if they are outside of the groups that are looked at first."""
    logits = torch.randn(1, 10_000, device=DEVICE) * 0.1
    logits[:, :1800] -= 0.3
    many = arguments(200, 10_000, top_k=[9500])
    flags = SamplingFlags(False, 10_000, False)
    want, _ = sample.reference(logits.expand(200, -1), **many, flags=flags)
    rare = (want < 1800).nonzero()[:2, 0]
    assert len(rare) == 2
    given = {name: values[rare] for name, values in many.items()}
    assert torch.equal(kernels.sample_triton(logits.expand(2, -1), **given, flags=flags)[0], want[rare])


def test_ties_at_the_threshold_all_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]], device=DEVICE)
    assert kept(logits, arguments(1, 6, top_k=[2])).tolist() == [[True, False, True, True, True, False]]


@pytest.mark.parametrize("filters", [{}, {"top_k": [3]}])
def test_low_temperatures_leave_equal_logits_to_chance(filters: dict[str, list[float]]) -> None:
    """Next to 200 / 1.1e-5, float32 has no room for random numbers. Equals are in one block and in two."""
    given = arguments(12, 4100, temperature=[1.1e-5], **filters)
    logits = torch.randn(12, 4100, device=DEVICE)
    logits[:, [7, 9, 4000]] = 200.0
    flags = SamplingFlags(False, 4100 * bool(filters), False)
    want = sample.reference(logits, **given, flags=flags)[0]
    assert want.unique().numel() == 3
    assert torch.equal(kernels.sample_triton(logits, **given, flags=flags)[0], want)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 700, device=DEVICE)
    given = arguments(6, 700, top_p=[0.9], top_k=[0, 30], temperature=[0.8, 0.0, 1.3])
    flags = SamplingFlags(False, 700, False)
    together, _ = kernels.sample_triton(logits, **given, flags=flags)
    for row in range(6):
        of_row = {n: t[row : row + 1] for n, t in given.items()}
        alone, _ = kernels.sample_triton(logits[row : row + 1], **of_row, flags=flags)
        assert alone[0] == together[row]


def test_broken_rows_are_named_and_give_an_id_inside_the_vocabulary() -> None:
    logits = torch.randn(5, 100, device=DEVICE)
    logits[0] = torch.nan
    logits[1, 50:] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4, :99] = -torch.inf
    given = arguments(5, 100, top_p=[0.9], top_k=[10])
    out, nan_rows = kernels.sample_triton(logits, **given, flags=SamplingFlags(False, 100, False))
    assert ((out >= 0) & (out < 100)).all()
    assert nan_rows.tolist() == [True, True, True, True, False]
