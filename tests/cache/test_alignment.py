"""The table of alignment losses in the documents is what the policies really lose."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import pytest

from tests.cache.test_manager import make
from weft.cache.state_plan import CheckpointPolicy
from weft.cache.tuning import replay_request

DOCUMENT = Path(__file__).parents[2] / "docs" / "prefix-cache.md"


def documented() -> dict[str, list[int]]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| prompt tokens |"))
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[first : first + 5]]
    return {name: list(map(int, values)) for name, *values in rows if name[:3] != "---"}


@pytest.mark.parametrize("policy", get_args(CheckpointPolicy))
def test_losses_are_the_documented_ones(policy: str) -> None:
    table, losses = documented(), []
    for length in table["prompt tokens"]:
        manager, _ = make(checkpoint_policy=policy)
        rng = random.Random(length)
        prompt, answer = ([rng.randrange(1000) for _ in range(count)] for count in (length, 30))
        replay_request(manager, prompt + answer, length)
        losses.append(length - 1 - replay_request(manager, prompt, length))
    assert losses == table[policy]
    assert any(losses) == (policy != "exact")
