"""The example of a training loop, in short: engine and trainer agree, and no prefix of old weights is reused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from examples.grpo import InProcess, Sample, advantages, load_trainer, parse, run
from examples.grpo_trl import Rollouts, problems, reward
from tests.whole import takes_long
from weft.config.locate import locate


@pytest.mark.parametrize("server", [False, pytest.param(True, marks=takes_long)], ids=["in process", "server"])
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


def test_rollouts_for_a_trainer_library() -> None:
    """Call rollouts as TRL does, with each prompt as often as its group is large."""
    tokenizer = AutoTokenizer.from_pretrained(locate(None))
    engine, trainer = InProcess(), SimpleNamespace(model=load_trainer(0.2), num_generations=2)
    try:
        rollouts = Rollouts(engine, tokenizer)
        rows = [row for row in problems(2, 0) for _ in range(2)]
        found = rollouts([row["prompt"] for row in rows], trainer)
    finally:
        engine.close()
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
        ("prompt_ids", "completion_ids", "logprobs"), 4
    )
    (step,) = rollouts.steps
    assert step.largest_difference < 1e-4 and step.stale_hits == 0
    texts = [[{"content": tokenizer.decode(ids, skip_special_tokens=True)}] for ids in found["completion_ids"]]
    assert set(reward(texts, [row["right"] for row in rows])) <= {0.0, 1.0}
    assert reward([[{"content": "Answer: 12"}]], [12]) == [1.0] and reward([[{"content": "Answer: 11"}]], [12]) == [0.0]
