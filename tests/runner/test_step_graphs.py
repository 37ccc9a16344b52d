"""Graphs, on the emulator: what is replayed is the captured tape, and it answers like the eager engine."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_checkpoint
from tests.whole import unless_long
from tests.x_matrix import runner_of
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.errors import ConfigError
from weft.graph.capture_sizes import CaptureSizes, decode_sizes
from weft.graph.dispatcher import smallest_fitting
from weft.graph.graph import EmulatedGraphPool, capture
from weft.graph.graph_set import CaptureOptions, FunctionRecorder, GraphSet
from weft.parallel.tensor_parallel import SingleRank
from weft.runner.model_runner import ModelRunner
from weft.runner.step_graphs import StepGraphs

QUIET = CaptureOptions(torch.device("cpu"), show_progress=False)


def workload(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1500) for _ in range(rng.choice([1, 2, 63, 64, 65, 90]))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(2, 24),
            ignore_eos=True,
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            presence_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([None, 2]),
            seed=i,
        )
        for i in range(count)
    ]
    return prompts, params


SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 6,
    "max_model_len": 160,
    "page_size": 4,
    "max_num_batched_tokens": 96,
}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(*workload(12, 5), use_tqdm=False)]


CASES = [(True, "NONE", None), (False, "NONE", 42), (False, "FULL_DECODE_ONLY", None), (True, "FULL_DECODE_ONLY", 42)]


@pytest.mark.parametrize(
    ("overlap", "mode", "pages"),
    unless_long(CASES[2:3], CASES),
)
def test_graphs_overlap_and_preemption_do_not_change_the_answers(
    expected: list[list[int]], overlap: bool, mode: str, pages: int | None
) -> None:
    sizes = {"cuda_graph_bs": [1, 2, 4]} if mode != "NONE" else {}
    with LLM(**SETTINGS, **sizes, enable_overlap=overlap, cuda_graph_mode=mode, num_kv_pages=pages) as llm:
        outputs = llm.generate(*workload(12, 5), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        assert (llm.stats().num_preemptions > 0) == (pages is not None)
        graphs = llm._core._executor._runner.graphs.decode
        if mode == "NONE":
            assert graphs is None
        else:
            assert graphs is not None and graphs.sizes == [1, 2, 4] and graphs.counters.captures == 3
            assert graphs.counters.replays > 10 and (graphs.counters.missed > 0 or pages is not None)
            assert 0 < graphs.counters.padding_rows < graphs.counters.rows


@pytest.mark.parametrize(
    ("every", "runs"),
    [(False, [5, 5, 4, 2, 1, 1]), (True, [5, 5, 4, 4, 2, 2, 1, 1])],
    ids=["ends", "every"],
)
def test_sizes_run_before_their_capture(every: bool, runs: list[int]) -> None:
    """The largest and the smallest, or all."""
    found: list[int] = []
    x = torch.zeros(5)

    def function(size: int) -> torch.Tensor:
        found.append(size)
        return x[:size] + 1

    recorder = FunctionRecorder(function, EmulatedGraphPool())
    graphs = GraphSet("graphs", recorder, [1, 2, 4, 5], QUIET, warm_every_size=every)
    assert found == runs and graphs.sizes == [1, 2, 4, 5]
    x.fill_(3)
    assert graphs.replay(2, 1).tolist() == [4, 4] and found == runs


@pytest.mark.parametrize("keep_gc", [False, True])
def test_nothing_is_collected_during_captures_unless_it_is_asked_for(keep_gc: bool) -> None:
    found: list[bool] = []

    def function(size: int) -> torch.Tensor:
        found.append(gc.isenabled())
        return torch.zeros(size)

    GraphSet("graphs", FunctionRecorder(function, EmulatedGraphPool()), [1, 2], replace(QUIET, keep_gc=keep_gc))
    assert set(found) == {keep_gc} and gc.isenabled()


def test_all_graphs_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a MiB of 4: of the last set none is captured, and steps sample without it."""
    used = itertools.count(0, 2**20)
    monkeypatch.setattr("weft.graph.graph_set.reserved_bytes", lambda device: next(used))
    monkeypatch.setattr("weft.runner.step_graphs.GRAPH_BYTES", 4 * 2**20)
    sizes = {"cuda_graph_bs": (1, 2, 4), "piecewise_cuda_graph_tokens": (8, 16)}
    folder = str(make_checkpoint("Qwen3NextForCausalLM", tmp_path))
    with LLM(folder, skip_tokenizer_init=True, cuda_graph_mode="FULL", **sizes) as llm:
        graphs = runner_of(llm).graphs
        captured = [graphs.forward.sizes, graphs.decode.sizes, graphs.samples.sizes]
        assert captured == [[8, 16], [1, 2, 4], []]
        (output,) = llm.generate([[5] * 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4 and llm.stats().steps_by_mode == {"FULL": 4}


def test_large_steps_leave_room_for_graphs_of_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of 16 tokens would take more than the budget. Smaller ones are captured, and all decodes."""
    monkeypatch.setattr("weft.runner.step_graphs.GRAPH_BYTES", 100)
    runs: list[int] = []

    def peak(run: Callable[[], torch.Tensor], device: torch.device) -> int:
        runs.append(10 * len(run()))
        return runs[-1]

    monkeypatch.setattr("weft.runner.step_graphs.peak_bytes", peak)
    sizes = {"cuda_graph_bs": (1, 2, 4), "piecewise_cuda_graph_tokens": (4, 8, 16)}
    folder = str(make_checkpoint("Qwen3NextForCausalLM", tmp_path))
    with LLM(folder, skip_tokenizer_init=True, cuda_graph_mode="FULL", **sizes) as llm:
        graphs = runner_of(llm).graphs
        assert [graphs.forward.sizes, graphs.decode.sizes] == [[4], [1, 2, 4]] and runs == [160, 80, 40]
        (output,) = llm.generate([[5] * 6], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4 and llm.stats().steps_by_mode == {"FULL": 3, "NONE": 1}


def test_settings_of_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank shows its progress, and all capture what the poorest can."""

    class Second(SingleRank):
        rank = 1

        def least(self, value: int) -> int:
            return min(value, 10**9)

    seen: list[CaptureOptions] = []
    monkeypatch.setattr("weft.runner.model_runner.capture_graphs", lambda *given: seen.append(given[4]) or StepGraphs())
    folder = str(make_checkpoint("Qwen3NextForCausalLM", tmp_path))
    for is_on in (False, True):
        settings = {"enable_cudagraph_gc": is_on, "enable_torch_compile_debug_mode": is_on}
        runner = ModelRunner(resolve(model=folder, skip_tokenizer_init=True, cuda_graph_mode="FULL", **settings))
    seen.pop()
    runner.tp = Second()
    runner._capture_graphs()
    first, second = seen
    assert (first.keep_gc, first.show_progress, first.watched) == (False, True, None)
    assert (second.keep_gc, second.show_progress) == (True, False) and second.watched is not None
    assert (first.least(2 * 10**9), second.least(2 * 10**9)) == (2 * 10**9, 10**9)


def test_replay_repeats_device_work_and_no_python() -> None:
    x, calls = torch.tensor([1.0, 2.0]), []

    def step() -> torch.Tensor:
        calls.append(1)
        return (x * 2).add_(1).reshape(2, 1)

    graph, out = capture(EmulatedGraphPool(), step)
    assert out.tolist() == [[3.0], [5.0]]
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert out.tolist() == [[21.0], [41.0]] and len(calls) == 1


def test_rebound_buffer_and_frozen_value_show_in_a_replay() -> None:
    """The emulation fails as a GPU would: a replay uses the host values of the capture and sees no new tensors."""
    state = {"x": torch.ones(2), "factor": 3}
    graph, out = capture(EmulatedGraphPool(), lambda: state["x"] * state["factor"])
    state["x"], state["factor"] = torch.full((2,), 5.0), 7
    graph.replay()
    assert out.tolist() == [3.0, 3.0]


def test_copies_disguised_as_views_are_replayed() -> None:
    x = torch.arange(6, dtype=torch.int32).view(2, 3)
    with torch.inference_mode():
        graph, out = capture(EmulatedGraphPool(), lambda: (x.t().reshape(6), x.long(), x.t().contiguous()))
        x.mul_(10)
        graph.replay()
    assert out[0].tolist() == [0, 30, 10, 40, 20, 50]
    assert out[1].flatten().tolist() == [0, 10, 20, 30, 40, 50] and out[2].tolist() == x.t().tolist()


def test_host_synchronisation_in_a_capture_is_refused() -> None:
    x = torch.ones(3)
    waits = (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[x > 0], lambda: x + torch.tensor([1.0, 2.0, 3.0]))
    for wait in waits:
        with pytest.raises(RuntimeError, match="inside a captured graph"):
            capture(EmulatedGraphPool(), wait)


def test_verifications_are_captured_as_far_as_a_step_has_room() -> None:
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 13, "cuda_graph_mode": "FULL_DECODE_ONLY"}
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    sizes = CaptureSizes.of(resolve(device="cpu", **settings, speculative_config=drafts), 4)
    assert (sizes.decode, sizes.verification) == ([1, 2, 4], [1, 2])


@pytest.mark.parametrize("short", [{"max_model_len": 4}, {"num_kv_pages": 3}])
def test_a_context_that_is_shorter_than_a_verification(short: dict[str, int]) -> None:
    """Its pages hold four tokens: fewer than the last one and four drafts."""
    settings: dict[str, Any] = {"cuda_graph_mode": "FULL_DECODE_ONLY", "max_num_seqs": 2, "page_size": 2} | short
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    with LLM(device="cpu", load_format="dummy", cpu_cache_gib=0.05, speculative_config=drafts, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 5]}, params, use_tqdm=False)
    assert llm.max_model_len == 4 and len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("mode", "samples"),
    [("FULL", [1, 2]), ("PIECEWISE", [1, 2]), ("FULL_AND_PIECEWISE", [1, 2]), ("FULL_DECODE_ONLY", [])],
)
def test_sampling_is_captured_where_it_is_apart_from_the_forward_pass(mode: str, samples: list[int]) -> None:
    config = resolve(device="cpu", max_num_seqs=2, cuda_graph_mode=mode)
    assert list(CaptureSizes.of(config, 2).samples) == samples


def test_capture_list() -> None:
    assert decode_sizes(1024)[:7] == [1, 2, 4, 8, 16, 24, 32] and decode_sizes(1024)[-1] == 1024
    assert decode_sizes(5) == [1, 2, 4, 5]
    assert decode_sizes(300, largest=20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(8, given=[4, 2, 4, 100]) == [2, 4]
    assert decode_sizes(2048, given=[64, 1500]) == [64, 1500] and decode_sizes(2048)[-1] == 1024
    with pytest.raises(ConfigError, match="cuda_graph_bs"):
        decode_sizes(8, given=[16])
    for limit in (1, 7, 100, 1000, 3000):
        sizes = decode_sizes(limit)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(limit, 1024)
        for wanted in range(9, sizes[-1] + 1):
            fitting = smallest_fitting(sizes, wanted)
            assert fitting is not None and wanted <= fitting < wanted * 2
    assert smallest_fitting([1, 4], 5) is None and smallest_fitting([1, 4], 2) == 4
