"""Prompt lookup: the longest suffix that stood before, and what followed it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.messages import RowSampling
from weft.request import Request, RequestSpec
from weft.speculation.ngram import NgramProposer, continuation


def obvious(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    for length in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):  # latest first
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                longer = list(tokens)
                for i in range(count):
                    longer.append(longer[end + i])
                return longer[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(200))
def test_matches_a_search_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice([1, 2, 4])) for _ in range(rng.randint(1, 40))]
    low = rng.randint(1, 3)
    high = low + rng.randint(0, 3)
    assert continuation(np.array(tokens), low, high, 5) == obvious(tokens, low, high, 5)


def test_the_longest_suffix_goes_before_the_latest() -> None:
    assert continuation(np.array([1, 2, 3, 9, 8, 7, 2, 3, 4, 4, 1, 2, 3]), 1, 3, 2) == [9, 8]
    assert continuation(np.array([1, 2, 3, 9, 8, 7, 2, 3, 4, 4, 1, 2, 3]), 1, 2, 2) == [4, 4]
    assert continuation(np.array([1, 2, 3, 4]), 1, 3, 2) == []


def test_follows_the_output_and_forgets() -> None:
    proposer = NgramProposer(2, 4)
    request = Request.of(RequestSpec("r", [5, 6, 7, 8], RowSampling(), 100))
    assert proposer.propose(request, 3) == []
    for token in (1, 5, 6):
        request.append(token, None)
    assert proposer.propose(request, 3) == [7, 8, 1]
    for _ in range(3):
        request.append(9, None)
    assert proposer.propose(request, 2) == [9, 9]  # what follows the suffix reaches its end and repeats
    proposer.forget("r")
    assert not proposer._histories
