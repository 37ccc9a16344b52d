"""The example of a training loop, in short: engine and trainer agree, and no prefix of old weights is reused."""

from __future__ import annotations

import pytest

from examples.grpo import Sample, advantages, parse, run


@pytest.mark.parametrize("server", [False, True], ids=["in process", "server"])
def test_engine_and_trainer_agree(server: bool) -> None:
    given = ["--steps", "3", "--problems", "2", "--group", "3", *(["--server"] if server else [])]
    found = run(parse(given))
    summary, steps = found["summary"], found["each_step"]
    assert summary["steps"] == 3 and summary["stale_hits"] == 0
    assert summary["mean_difference"] < 1e-5 and summary["largest_difference"] < 1e-4
    assert all(0 <= step["reward"] <= 1 for step in steps)


def test_advantages_are_those_of_the_group() -> None:
    samples = [Sample([1], [2], [0.0], reward) for reward in (1.0, 0.0, 1.0, 1.0)]
    found = advantages(samples, 2)
    assert found[0] > 0 > found[1] and found[2] == found[3] == 0
