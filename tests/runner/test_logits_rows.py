"""The last layer computes only the rows from which a token may be sampled: the same values, the same caches."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import leave_parts
from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.config.graph_modes import GraphMode
from weft.graph.dispatcher import Choice
from weft.layers import moe
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.models.decoder import DecoderLayer
from weft.runner.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    "device": "cpu", "max_num_batched_tokens": 96, "max_num_seqs": 6, "max_model_len": 160, "page_size": 8,
    "skip_tokenizer_init": True, "cpu_cache_gib": 0.05,
}  # fmt: skip
FAMILIES = (  # each placement of norms, and each kind of mixer that a last layer is
    "Qwen3ForCausalLM", "Qwen3NextForCausalLM", "OlmoHybridForCausalLM", "Gemma3ForCausalLM", "MiniMaxForCausalLM",
    "NemotronHForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM", "Lfm3ForCausalLM",
    "RecurrentGemmaForCausalLM", "Zamba2ForCausalLM", "ZayaForCausalLM", "InklingForCausalLM",
    "Inkling2ForCausalLM",
)  # fmt: skip
LAST_LAYERS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]},
    "Zamba2ForCausalLM": {"layers_block_type": ["hybrid", "linear_attention"] * 2 + ["hybrid"] * 2},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
}


def mixture(runner: ModelRunner) -> SchedulerOutput:
    """Two sequences that decode, a whole prompt, and the second chunk of one that goes on."""
    rng, vocab = random.Random(3), runner.config.model_config.vocab_size
    lengths, starts, counts = (9, 30, 21, 120), (9, 30, 0, 40), (1, 1, 21, 37)
    has_states = int(runner.spec.has_states)
    new = [
        NewRequest(
            row, array("I", [rng.randrange(vocab) for _ in range(length + 1)]), length + 1, RowSampling(temperature=0.0)
        )
        for row, length in enumerate(lengths)
    ]
    pages = [[1 + 20 * row + i for i in range(20)] for row in range(4)]
    before = [
        ScheduledRequest(row, 0, start, pages[row], (row + 1) * has_states, True)
        for row, start in enumerate(starts) if start
    ]  # fmt: skip
    runner.run(SchedulerOutput(0, before, new))
    requests = [
        ScheduledRequest(row, start, count, [] if start else pages[row], (row + 1) * has_states, row < 3)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    return SchedulerOutput(1, requests)


def caches_of(runner: ModelRunner) -> list[Tensor]:
    return [tensor for cache in runner.caches.values() for tensor in cache.values()]


@pytest.mark.parametrize("arch", FAMILIES)
def test_rows_and_caches_are_those_of_a_whole_pass(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of decodes, a prompt, and a chunk that is not its prompt's last; without a graph, and in one that is
    larger than the step. With sums left to the norms that follow, as on a GPU."""
    leave_parts(monkeypatch)
    folder = make_checkpoint(arch, tmp_path, **LAST_LAYERS.get(arch, {}))
    settings = SIZES | {"cuda_graph_mode": "FULL", "cuda_graph_bs": [1], "piecewise_cuda_graph_tokens": [96]}
    runner = ModelRunner(resolve(model=str(folder), **settings))
    steps, scheduler_output = runner.steps, mixture(runner)
    layout = steps.builder.rules.layout(scheduler_output)
    shape = layout.shape
    steps.builder.build(layout, steps.functions.mixed_shape(96))
    before = [tensor.clone() for tensor in caches_of(runner)]
    ends = torch.tensor([r.num_tokens for r in scheduler_output.requests]).cumsum(0) - 1

    def run(mode: GraphMode, needs_all_rows: bool) -> tuple[Tensor, list[Tensor]]:
        for tensor, values in zip(caches_of(runner), before, strict=True):
            tensor.copy_(values)
        steps.functions.hidden.fill_(torch.nan)
        with torch.inference_mode():
            if mode is GraphMode.FULL:
                hidden_states = steps.graphs.replay_forward(shape, 96)
            else:
                selects_rows = not needs_all_rows and steps.builder.selects_rows(shape)
                inputs = steps.builder.materialise(shape, selects_rows=selects_rows)
                hidden_states = steps.forward(inputs, Choice(mode, 96))
        return hidden_states[ends], [tensor[1:].clone() for tensor in caches_of(runner)]

    rows, caches = run(GraphMode.NONE, needs_all_rows=True)
    fewer, same_caches = run(GraphMode.NONE, needs_all_rows=False)
    torch.testing.assert_close(fewer, rows, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(same_caches, caches, rtol=0, atol=0, equal_nan=True)
    fewer, same_caches = run(GraphMode.FULL, needs_all_rows=False)  # of padded steps products round otherwise
    torch.testing.assert_close(fewer, rows, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(same_caches, caches, rtol=1e-4, atol=1e-5, equal_nan=True)


class Heights:
    """Rows that the last layer's MLP gets, step by step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seen: list[int] = []
        last = runner.model.model.layers[-1]
        assert isinstance(last, DecoderLayer)
        last.mlp.register_forward_pre_hook(lambda _, inputs: self.seen.append(inputs[0].shape[0]))


def test_all_rows_where_they_are_asked_for(tmp_path: Path) -> None:
    """Log probabilities of a prompt read every row; so do drafts. Other prompts in the same engine do not pay."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    asking = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    prompt = list(range(5, 45))
    with LLM(str(folder), cuda_graph_mode="NONE", **SIZES) as llm:
        heights = Heights(llm._core._executor._runner)
        plain = llm.generate([prompt], greedy, use_tqdm=False)
        assert heights.seen == [1, 1]
        asked = llm.generate([prompt], asking, use_tqdm=False)
        assert heights.seen == [1, 1, 40, 1]
    assert asked[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert asked[0].prompt_logprobs is not None and len(asked[0].prompt_logprobs) == 40
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with LLM(str(folder), cuda_graph_mode="NONE", speculative_config=drafts, **SIZES) as llm:
        heights = Heights(llm._core._executor._runner)
        llm.generate([prompt], greedy, use_tqdm=False)
        assert heights.seen[0] == 40


def test_log_probabilities_of_a_prompt_in_an_engine_with_graphs(tmp_path: Path) -> None:
    """The graph of a forward pass leaves the last tokens alone: such a step runs without it."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    prompt = list(range(5, 45))
    found = []
    graphs = {"cuda_graph_mode": "FULL", "cuda_graph_bs": [1], "piecewise_cuda_graph_tokens": [64]}
    for settings in ({"cuda_graph_mode": "NONE"}, graphs):
        with LLM(str(folder), **settings, **SIZES) as llm:
            [output] = llm.generate([prompt], asking, use_tqdm=False)
            assert output.prompt_logprobs is not None
            found.append([next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_row_that_is_padding_is_no_sequence_s_last(tmp_path: Path) -> None:
    """The result of padding is stored in a row that nobody reads, also where no token is padding."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    runner = ModelRunner(resolve(model=str(folder), cuda_graph_mode="NONE", **SIZES))
    builder = runner.steps.builder
    for counts, spare in (((4, 4), 0), ((1, 1, 6), 2), ((1, 1, 1), 3), ((1, 2), 1)):
        new = [NewRequest(row, array("I", [1] * 8), 8, RowSampling()) for row in range(len(counts))]
        requests = [ScheduledRequest(row, 0, count, [1 + row], 0, True) for row, count in enumerate(counts)]
        runner.steps.prepare(SchedulerOutput(0, requests, new))
        builder.build(builder.rules.layout(SchedulerOutput(0, requests)), builder.mixed_shape(8, 0))
        indices = builder._host["logits_indices"][:6].tolist()
        assert indices[: len(counts)] == [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
        assert set(indices[len(counts) :]) == {spare} and spare not in indices[: len(counts)]


def test_rows_of_no_sequence_are_sent_to_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer of a graph computes a row for each possible sequence, also for sequences that are absent."""
    folder = make_checkpoint("Qwen3MoeForCausalLM", tmp_path)
    settings = SIZES | {"cuda_graph_mode": "FULL", "cuda_graph_bs": [1], "piecewise_cuda_graph_tokens": [16]}
    steps = ModelRunner(resolve(model=str(folder), **settings)).steps
    new = [NewRequest(row, array("I", [1] * 4), 4, RowSampling()) for row in range(2)]
    requests = [ScheduledRequest(row, 0, 4, [1 + row], 0, True) for row in range(2)]
    steps.prepare(SchedulerOutput(0, requests, new))
    steps.builder.build(steps.builder.rules.layout(SchedulerOutput(0, requests)), steps.functions.mixed_shape(16))
    chosen: list[Tensor] = []
    route = moe.topk_router

    def noted(*args: Any, **kwargs: Any) -> Any:
        weights, ids = route(*args, **kwargs)
        chosen.append(ids)
        return weights, ids

    monkeypatch.setattr(moe, "topk_router", noted)
    with torch.inference_mode():
        steps.functions.forward(16)
    *_, first, last = chosen
    assert [(ids >= 0).all(1).tolist() for ids in (first, last)] == [[True] * 8 + [False] * 8, [True] * 2 + [False] * 4]
