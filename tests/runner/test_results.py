"""A step's results are read from memory that no other step writes before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.config import resolve
from weft.layers.sampler import Logprobs
from weft.messages import ModelOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from weft.ops.backend import Backend
from weft.ops.drafts.types import NO_DRAFT
from weft.runner.model_runner import ModelRunner
from weft.runner.results import ResultBlock, ResultMemory, failed_prefills, pending_step
from weft.runner.sampling.step_sampler import StepTokens
from weft.runner.warmup import step

SETTINGS: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "max_num_seqs": 3, "max_model_len": 32, "cuda_graph_mode": "NONE"
}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    yield ModelRunner(resolve(**SETTINGS))


def steps(runner: ModelRunner) -> list[SchedulerOutput]:
    slot = int(runner.spec.has_states)
    return [step([(0, count)] * seqs, slot) for count, seqs in ((5, 1), (1, 3), (4, 2), (2, 3))]


def told(output: ModelOutput) -> tuple[Any, ...]:
    return output.rows, output.token_ids, output.failed_rows


def test_steps_in_flight_share_no_memory(runner: ModelRunner) -> None:
    expected = [told(runner.run(s)) for s in steps(runner)]
    assert len({str(e) for e in expected}) == len(expected), "steps with the same results show nothing"
    pending = [runner.launch(s) for s in steps(runner)]
    assert [told(p.result()) for p in pending] == expected


def test_results_may_stay_unread(runner: ModelRunner) -> None:
    """Ranks other than 0 read none."""
    memory = runner.steps._results
    for scheduler_output in steps(runner) * 2:
        runner.launch(scheduler_output)
    before = len(memory._free)
    for scheduler_output in steps(runner) * 2:
        runner.launch(scheduler_output)
    assert len(memory._free) == before >= 1


def store(memory: ResultMemory, token: int) -> ResultBlock:
    return memory.store(torch.tensor([token, token]), None, None, None, None)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    memory = ResultMemory(4, torch.device("cpu"), Backend.TORCH)
    first, second = store(memory, 1), store(memory, 2)
    places = {block.host.data_ptr() for block in (first, second)}
    assert len(places) == 2 and first.host[0, :2].tolist() == [1, 1]
    del first
    third = store(memory, 3)
    assert third.host.data_ptr() in places and third.host.data_ptr() != second.host.data_ptr()
    assert second.host[0, :2].tolist() == [2, 2] and not memory._free


def test_memory_comes_back_from_a_step_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may be queued: nobody else may get the memory."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    memory = ResultMemory(4, torch.device("cpu"), Backend.TORCH)
    held = store(memory, 1)
    place = held.host.data_ptr()
    del held
    monkeypatch.setattr("weft.runner.results.store_step_results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store(memory, 2)
    assert [host.data_ptr() for host, _ in memory._free] == [place]


def test_results_of_rows_with_drafts_and_of_rows_that_do_not_sample() -> None:
    """Row 4 runs a part of its prompt. Row 2 has three positions, of which two count, and log probabilities. Row 7 has
    NaN logits and no draft."""
    requests = [
        ScheduledRequest(2, 5, 3, [], 2, True),
        ScheduledRequest(7, 9, 1, [], 3, True),
        ScheduledRequest(4, 0, 8, [], 1, False),
    ]
    ids = torch.tensor([[10, 1], [11, 2], [12, 3]])
    sampled = StepTokens(
        [2, 2, 2, 7],
        torch.tensor([10, 11, 12, 13]),
        torch.tensor([False, False, False, True]),
        acceptance=SimpleNamespace(counted=torch.tensor([True, True, False, True])),  # type: ignore[arg-type]
        num_logprobs={0: 1, 1: 0, 2: 1},
        logprobs=Logprobs(ids, -ids.float(), torch.tensor([1, 2, 3])),
    )
    pending = pending_step(
        ResultMemory(8, torch.device("cpu"), Backend.TORCH),
        SchedulerOutput(6, requests),
        sampled,
        hidden_states=torch.full((12, 4), torch.nan),
        drafts=torch.tensor([[20, 21], [NO_DRAFT, NO_DRAFT]]),
    )
    output = pending.result()
    assert (output.step, output.rows, output.token_ids) == (6, [2, 2, 7], [10, 11, 13])
    assert output.logprobs == {2: [TokenLogprobs([10, 1], [-10.0, -1.0], 1), TokenLogprobs([11], [-11.0], 2)]}
    assert output.failed_rows == [7, 4] and output.draft_token_ids == {2: [20, 21]}


def test_all_rows_may_verify_all_drafts() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    runner = ModelRunner(resolve(**SETTINGS, speculative_config=drafts))
    slot = int(runner.spec.has_states)
    output = runner.run(step([(4, 1)] * 3, slot, num_drafts=3))
    assert set(output.rows) == {0, 1, 2} and len(output.token_ids) == len(output.rows) >= 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_chunk_whose_last_token_is_not_finite_has_failed(bad: float) -> None:
    """Rows that sample are judged by their logits; other tokens of a chunk are not looked at."""
    chunk = ScheduledRequest(0, 0, 3, [1], 0, False)
    samples = ScheduledRequest(1, 0, 2, [2], 0, True)
    other = ScheduledRequest(2, 0, 1, [3], 0, False)
    hidden = torch.zeros(6, 4)
    hidden[0, 1] = hidden[4, 2] = bad
    assert failed_prefills(SchedulerOutput(0, [chunk, samples, other]), hidden).tolist() == [False, False]
    hidden[2, 3] = bad
    assert failed_prefills(SchedulerOutput(0, [chunk, samples, other]), hidden).tolist() == [True, False]
    assert failed_prefills(SchedulerOutput(0, [samples]), hidden) is None
