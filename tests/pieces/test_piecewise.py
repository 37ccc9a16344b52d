"""Pieces in the engine, on the emulator: same tokens as without graphs, whatever the mix and whatever ran before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pieces.scribble import ScribblingPool, scribble_buffers
from tests.tiny import make_checkpoint
from tests.whole import RUNS_LONG, takes_long, unless_long
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.config.graph_modes import GraphMode
from weft.forward_context import ForwardContext, forward_context
from weft.graph import graph
from weft.graph.dispatcher import Choice
from weft.graph.graph import EmulatedGraphPool
from weft.graph.graph_set import CaptureOptions
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.pieces.capture import PiecewiseModel
from weft.runner.model_runner import ModelRunner
from weft.runner.step_inputs import StepInputs

ARCHS = ("Qwen3NextForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 6,
    "max_model_len": 320,
    "page_size": 4,
    "max_num_batched_tokens": 210,
    "skip_tokenizer_init": True,
}
TOKENS = [1, 4, 8, 16, 32, 64, 100, 130, 210]


@pytest.fixture(params=ARCHS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(request.param, tmp_path)


@pytest.fixture
def churn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Before every step in pieces, all that graphs computed and all that crosses a break is rubbish."""
    run, sizes = PiecewiseModel.run, []

    def churned(self: PiecewiseModel, context: ForwardContext, ids: torch.Tensor, size: int) -> torch.Tensor:
        self._source._pool.scribble()  # type: ignore[attr-defined]
        scribble_buffers(self._source.buffers)
        sizes.append(size)
        return run(self, context, ids, size)

    monkeypatch.setattr(PiecewiseModel, "run", churned)
    monkeypatch.setattr(graph, "EmulatedGraphPool", ScribblingPool)
    yield sizes


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(11)
    lengths = [1, 2, 63, 64, 65, 129, 210, 90, 300, 17, 31]
    prompts = [[rng.randrange(200) for _ in range(n)] for n in lengths]
    params = [
        SamplingParams(
            max_tokens=rng.randint(2, 9),
            ignore_eos=True,
            temperature=rng.choice([0.0, 1.0]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, 1]),
            seed=i,
        )
        for i in range(len(lengths))
    ]
    return prompts, params


def answers(model: Path | None, **settings: Any) -> tuple[list[list[int]], ModelRunner]:
    with LLM(model and str(model), **SETTINGS | settings) as llm:
        runner = llm._core._executor._runner
        return [o.outputs[0].token_ids for o in llm.generate(*workload(), use_tqdm=False)], runner


WAYS: list[dict[str, Any]] = [
    {"cuda_graph_mode": "PIECEWISE", "enable_torch_compile_debug_mode": True},
    {"cuda_graph_mode": "FULL_AND_PIECEWISE", "cuda_graph_bs": [1, 2, 4]},
    {"cuda_graph_mode": "FULL_AND_PIECEWISE", "cuda_graph_bs": [1, 4], "num_kv_pages": 130, "enable_overlap": True},
]


@pytest.mark.parametrize(
    ("checkpoint", "settings"), [*zip(ARCHS, WAYS, strict=True)] if not RUNS_LONG else [*product(ARCHS, WAYS)],
    indirect=["checkpoint"],
)
def test_pieces_do_not_change_the_answers(checkpoint: Path, settings: dict[str, Any], churn: list[int]) -> None:
    expected, _ = answers(checkpoint)
    assert not churn
    given, runner = answers(checkpoint, **settings, piecewise_cuda_graph_tokens=TOKENS)
    assert given == expected
    assert len(set(churn)) >= 5
    graphs, breaks = runner.graphs, runner.config.model_config.layer_types.count("full_attention")
    pieces = graphs.pieces
    assert pieces is not None and pieces.sizes == TOKENS and pieces.counters.captures == len(TOKENS)
    assert len(pieces._source._plan) + 1 == breaks + 1 and pieces.counters.replays == len(churn)
    assert 0 < pieces.counters.padding_rows < pieces.counters.rows == sum(churn)
    assert (graphs.decode is not None) == ("cuda_graph_bs" in settings)
    if graphs.decode is not None:
        assert graphs.decode.counters.replays > 3


@takes_long
def test_the_bundled_model_answers_alike(churn: list[int]) -> None:
    expected, _ = answers(None)
    given, _ = answers(None, enable_piecewise_cuda_graph=True, piecewise_cuda_graph_tokens=[8, 64, 210])
    assert given == expected and churn


def step(sequences: list[tuple[int, int, int]], page_size: int = 4, pages_each: int = 80) -> SchedulerOutput:
    """``(row, start, num_tokens)`` each; row r owns pages from ``1 + r * pages_each`` on and slot ``1 + r``."""
    new, requests = [], []
    for row, start, count in sequences:
        pages = [1 + row * pages_each + i for i in range(pages_each)] if start == 0 else []
        if start == 0:
            rng = random.Random(row)
            new.append(
                NewRequest(row, array("I", [rng.randrange(200) for _ in range(300)]), 300, RowSampling(temperature=0.0))
            )
        requests.append(ScheduledRequest(row, start, count, pages, 1 + row, True))
    return SchedulerOutput(0, requests, new)


def mixed_steps() -> list[list[tuple[int, int, int]]]:
    """Steps of decodes and prefill chunks of six sequences, up to 300 tokens each."""
    rng, at, steps = random.Random(1), [0] * 6, []
    for _ in range(40):
        work: list[tuple[int, int, int]] = []
        for row in rng.sample(range(6), rng.randint(1, 6)):
            count = min(rng.choice([1, 1, 2, 31, 63, 64, 65]), 300 - at[row])
            if count and count + sum(n for _, _, n in work) <= SETTINGS["max_num_batched_tokens"]:
                work.append((row, at[row], count))
                at[row] += count
        steps.append(sorted(work, key=lambda w: not (w[2] == 1 and w[1] > 0)))
    assert sum(at) > 900
    return [work for work in steps if work]


class EagerPieces(PiecewiseModel):
    """The passes that would be captured, operation by operation: products of the same shapes, and no graph."""

    def run(self, context: ForwardContext, ids: torch.Tensor, size: int) -> torch.Tensor:
        padded = torch.zeros(size, dtype=ids.dtype)
        padded[: len(ids)] = ids
        with forward_context(self._context(size)):
            return self.model(input_ids=padded)[: len(ids)]


@pytest.mark.parametrize("checkpoint", unless_long(ARCHS[2:], ARCHS), indirect=True)
@pytest.mark.parametrize("padded", [pytest.param(False, marks=takes_long), True])
def test_hidden_states_and_caches_of_mixed_batches(
    checkpoint: Path, churn: list[int], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces compute bit for bit what the same padded pass computes without graphs.

    Steps without padding differ from both by rounding alone: how a product sums depends on its number of rows, and
    even a pass without padding tokens runs its decoding rows padded. See ``rounding``.
    """
    steps = mixed_steps()
    sizes = TOKENS if padded else sorted({sum(n for _, _, n in work) for work in steps})
    settings = resolve(
        **SETTINGS, model=str(checkpoint), num_kv_pages=500, cuda_graph_mode="PIECEWISE",
        piecewise_cuda_graph_tokens=sizes,
    )  # fmt: skip
    pieces = ModelRunner(settings)
    monkeypatch.setattr("weft.pieces.model_compiler.PiecewiseModel", EagerPieces)
    eager = ModelRunner(settings)
    plain = ModelRunner(resolve(**SETTINGS, model=str(checkpoint), num_kv_pages=500))
    given, expected, unpadded = noted_states(pieces), noted_states(eager), noted_states(plain)
    for scheduler_output in map(step, steps):
        for runner in (plain, eager, pieces):
            runner.run(scheduler_output)
        torch.testing.assert_close(given[-1], expected[-1], rtol=0.0, atol=0.0)
    assert len(set(churn)) >= 5
    for name, cache in eager.caches.items():
        for field, theirs in cache.items():
            torch.testing.assert_close(pieces.caches[name][field][1:], theirs[1:], equal_nan=True, rtol=0.0, atol=0.0)
    bounds = rounding(checkpoint, steps, unpadded)
    for ours, theirs, bound in zip(given, unpadded, bounds, strict=True):
        assert (ours - theirs).abs().max() <= bound


def rounding(checkpoint: Path, steps: list[list[tuple[int, int, int]]], exact: list[torch.Tensor]) -> list[float]:
    """How far each step's hidden states move when sums of products are rounded in another order.

    A sum of n products, in any order, is exact for factors that are off by about sqrt(n) * 2**-24 each (Higham and
    Mary, SIAM J. Sci. Comput. 41, 2019). So the weights are moved by twice that at random, once for each of the two
    orders, with the n of the widest product, and the run is repeated.
    """
    runner = ModelRunner(resolve(**SETTINGS, model=str(checkpoint), num_kv_pages=500))
    generator = torch.Generator().manual_seed(0)
    widest = max(p.shape[-1] for p in runner.model.parameters())
    with torch.no_grad():
        for parameter in runner.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + signs * (2 * widest**0.5 * 2.0**-24))
    moved = noted_states(runner)
    for scheduler_output in map(step, steps):
        runner.run(scheduler_output)
    return [(a - b).abs().max().item() for a, b in zip(moved, exact, strict=True)]


def noted_states(runner: ModelRunner) -> list[torch.Tensor]:
    """A list that receives the hidden states of every token of every step."""
    forward, states = runner.steps.forward, []

    def noted(inputs: StepInputs, choice: Choice) -> torch.Tensor:
        found = forward(inputs, choice)
        states.append(found.clone())
        return found

    runner.steps.forward = noted  # type: ignore[method-assign]
    runner.steps.builder.selects_rows = lambda shape: False  # type: ignore[method-assign]
    return states


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_what_moves_is_named_in_debug_mode(tmp_path: Path, mode: str) -> None:
    """Weights, caches, step buffers and row tables; before prefill and before decodes."""
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    settings = {"cuda_graph_mode": mode, "piecewise_cuda_graph_tokens": [1, 4], "model": str(folder)}
    runner = ModelRunner(resolve(**SETTINGS, **settings, enable_torch_compile_debug_mode=True))
    runner.run(step([(0, 0, 3)]))
    norm, rows, buffers = runner.model.model.norm, runner.steps.rows, runner.steps.builder._buffers
    (layer, cache), *_ = runner.caches.items()

    def refused(message: str, start: int) -> None:
        for count in (2, 1):
            with pytest.raises(RuntimeError, match=f"{message} is not the tensor"):
                runner.run(step([(0, start, count)]))

    for owner, name, message in (
        (norm.weight, "data", r"model\.norm\.weight"),
        (rows, "device_page_table", "page table"),
        (rows, "last_token", "last tokens"),
        (buffers, "_device", "step buffers"),
    ):
        kept = getattr(owner, name)
        setattr(owner, name, kept.clone())
        refused(message, 3)
        setattr(owner, name, kept)
    runner.caches[layer] = {name: tensor.clone() for name, tensor in cache.items()}
    refused(rf"{layer}\.{next(iter(cache))}", 3)
    runner.caches[layer] = cache
    runner.run(step([(0, 3, 2)]))


def test_the_step_says_how_it_ran(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    settings = {"cuda_graph_mode": "FULL_AND_PIECEWISE", "piecewise_cuda_graph_tokens": [64], "cuda_graph_bs": [2]}
    runner = ModelRunner(resolve(model=str(folder), **SETTINGS, **settings))
    steps = [step([(0, 0, 40)]), step([(0, 40, 1)]), step([(0, 41, 1), (1, 0, 100)]), step([(0, 42, 1), (1, 100, 40)])]
    told = [(pending.mode, pending.num_padding_tokens) for pending in map(runner.launch, steps)]
    assert told == [(GraphMode.PIECEWISE, 24), (GraphMode.FULL, 1), (GraphMode.NONE, 0), (GraphMode.PIECEWISE, 23)]


def test_memory_used_up_leaves_sizes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(0, 1000, 10))
    monkeypatch.setattr("weft.graph.graph_set.reserved_bytes", lambda device: next(used))
    pieces = PiecewiseModel(
        lambda input_ids: input_ids[:, None].float(),
        lambda size: ForwardContext(None, {}),  # type: ignore[arg-type]
        EmulatedGraphPool(),
        [1, 2, 4, 8],
        frozenset(),
        CaptureOptions(torch.device("cpu"), show_progress=False),
        budget_bytes=15,
    )
    assert pieces.sizes == [4, 8] and pieces.counters.capture_bytes == 20
