"""Graphs of all sizes in random order, thousands of times, while the allocator hands out and takes back memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import random_prompt, runner_of, tokens
from weft import LLM, SamplingParams
from weft.messages import SchedulerOutput

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 24,
    "max_model_len": 512,
    "max_num_batched_tokens": 300,
}
MIN_REPLAYS = 2000


def workload(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(11)
    prompts = [random_prompt(rng, rng.choice((1, 2, 7, 16, 63, 64, 65, 130, 210, 400))) for _ in range(count)]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 60), ignore_eos=True) for _ in range(count)]
    return prompts, params


class Churn:
    """Between steps, takes memory of random sizes, fills it with NaN, and gives some back."""

    def __init__(self, llm: LLM) -> None:
        self._rng, self._held = random.Random(5), list[torch.Tensor]()
        executor = llm._core._executor
        self._launch = executor.launch
        executor.launch = self  # type: ignore[method-assign, assignment]

    def __call__(self, scheduler_output: SchedulerOutput, processors: Any = None) -> Any:
        size = self._rng.choice((1 << 9, 1 << 14, 1 << 20, 3 << 20))
        self._held.append(torch.full((size // 4,), torch.nan, device="cuda"))
        if len(self._held) > 8:
            del self._held[self._rng.randrange(len(self._held))]
        return self._launch(scheduler_output, processors)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_thousands_of_replays_under_churn(mode: str) -> None:
    prompts, params = workload(60)
    with LLM(**SETTINGS, cuda_graph_mode="NONE", enable_prefix_caching=False) as llm:
        expected = tokens(llm.generate(prompts, params, use_tqdm=False))
    with LLM(**SETTINGS, cuda_graph_mode=mode, enable_prefix_caching=False) as llm:
        Churn(llm)
        runner, order, replays = runner_of(llm), list(range(len(prompts))), 0
        rng = random.Random(3)
        while replays < MIN_REPLAYS:
            rng.shuffle(order)
            got = tokens(llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False))
            assert got == [expected[i] for i in order]
            graphs = (runner.graphs.decode, runner.graphs.forward, runner.graphs.samples, runner.graphs.pieces)
            replays = sum(g.counters.replays for g in graphs if g is not None)
        assert runner.graphs.decode is not None and runner.graphs.decode.counters.padding_rows
