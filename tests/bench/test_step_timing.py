"""Steps of given sizes that can run again and again, and modes that take turns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from weft.bench.step_timing import MIN_REPEATS, StepMaker, compare, forced, time_step
from weft.config import EngineConfig, resolve
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.messages import SchedulerOutput
from weft.runner.model_runner import ModelRunner


def tuning(folder: Path, **settings: object) -> EngineConfig:
    config = resolve(
        model=str(folder),
        device="cpu",
        skip_tokenizer_init=True,
        cuda_graph_mode="FULL_AND_PIECEWISE",
        max_num_batched_tokens=130,
        max_num_seqs=20,
        max_model_len=64,
        cpu_cache_gib=0.01,
        piecewise_cuda_graph_tokens=[130],
        cuda_graph_bs=[4],
        **settings,
    )
    return dataclasses.replace(config, cuda_graph_mode=str(CudaGraphMode.TUNED))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("model"))
    return ModelRunner(tuning(folder))


def parts(step: SchedulerOutput) -> list[tuple[int, int]]:
    return [(r.start, r.num_tokens) for r in step.requests]


def test_prompts_are_as_few_as_the_context_allows(runner: ModelRunner) -> None:
    maker = StepMaker(runner, context=7)
    for num_tokens, lengths in ((1, [1]), (63, [63]), (64, [63, 1]), (130, [63, 63, 4])):
        step = maker.prefill(num_tokens)
        assert parts(step) == [(0, n) for n in lengths] and len(step.new_requests) == len(lengths)
        assert len({r.row for r in step.requests}) == len({r.state_slot for r in step.requests}) == len(lengths)


def test_nothing_reserved_is_touched(runner: ModelRunner) -> None:
    """Not even where the pages of the cache are used up and the first ones come again."""
    maker = StepMaker(runner, context=7)
    pages = [p for _ in range(runner.plan.num_pages) for r in maker.prefill(63).requests for p in r.new_pages]
    assert set(pages) == set(range(1, runner.plan.num_pages))
    assert all(r.state_slot > 0 for r in maker.prefill(130).requests)


def test_decodes_have_a_context_and_can_run_again(runner: ModelRunner) -> None:
    maker = StepMaker(runner, context=7)
    step = maker.decode(20)
    assert parts(step) == [(7, 1)] * 20 and not step.new_requests
    for _ in range(3):
        assert runner.run(step).failed_rows == []
    assert parts(maker.decode(3)) == [(7, 1)] * 3


def test_mixed_batches(runner: ModelRunner) -> None:
    maker = StepMaker(runner, context=7)
    for num_tokens, num_decodes in ((2, 1), (16, 15), (17, 16), (130, 16)):
        step = maker.mixed(num_tokens)
        assert step.num_tokens == num_tokens
        assert [r.start for r in step.requests[:num_decodes]] == [7] * num_decodes
        assert all(r.start == 0 for r in step.requests[num_decodes:])
        assert runner.run(step).failed_rows == []


def test_rows_that_prompts_took_get_their_context_back(runner: ModelRunner) -> None:
    maker = StepMaker(runner, context=7)
    maker.decode(3)
    runner.run(maker.prefill(40))
    runner.run(maker.decode(3))
    assert [runner.steps.rows.num_prompt_tokens[row] for row in range(3)] == [7] * 3


def test_a_context_fits_the_longest_sequence(runner: ModelRunner) -> None:
    assert parts(StepMaker(runner, context=5000).decode(1)) == [(62, 1)]


def test_candidates_take_turns_and_leave_nothing_behind(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before = StepMaker(runner, context=7).prefill(65), runner.graphs.dispatcher
    ran: list[str] = []
    launch = runner.launch

    def noting(step: SchedulerOutput) -> object:
        pending = launch(step)
        ran.append(pending.mode)
        return pending

    monkeypatch.setattr(runner, "launch", noting)
    found = compare(runner, step, {str(m): forced(m, 65) for m in GraphMode}, repeats=30, max_s=0.0)
    assert {name: len(ms) for name, ms in found.items()} == dict.fromkeys(["NONE", "PIECEWISE", "FULL"], MIN_REPEATS)
    rounds = [tuple(ran[i : i + 3]) for i in range(6, len(ran), 3)]
    assert all(set(r) == {"NONE", "PIECEWISE", "FULL"} for r in rounds) and len(set(rounds)) > 1
    assert runner.graphs.dispatcher is before


def test_a_mode_that_cannot_take_a_batch_is_seen(runner: ModelRunner) -> None:
    """More prompts than a graph takes run without one, whatever is asked for."""
    maker = StepMaker(runner, context=7)
    many = maker._prompts(17 * 7, 0, 7)
    with runner.graphs.dispatching(forced(GraphMode.FULL, 130)):
        assert time_step(runner, many)[1] == "NONE"
        ms, mode = time_step(runner, maker.prefill(5))
        assert mode == "FULL" and ms > 0, "a measured batch may be padded to more than twice its size"


def test_a_model_without_states(tmp_path: Path) -> None:
    runner = ModelRunner(tuning(make_checkpoint("Qwen3ForCausalLM", tmp_path)))
    maker = StepMaker(runner, context=7)
    step = maker.mixed(40)
    assert all(r.state_slot == 0 for r in step.requests) and runner.run(step).failed_rows == []
