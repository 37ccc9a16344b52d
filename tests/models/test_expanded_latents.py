"""Prompts whose latents are expanded: the answers of the absorbed form, in any steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.harness import Harness
from tests.models.test_parity import prompt, reference_logits
from tests.runner.test_step_graphs import SETTINGS, workload
from tests.tiny import make_checkpoint, make_model
from tests.whole import unless_long
from weft import LLM
from weft.forward_context import Batch
from weft.layers import latent_attention
from weft.ops.attention import expanded_latent_attention

LATENT = ["KimiLinearForCausalLM", "BailingHybridForCausalLM"]
GLM = "Glm5NextForConditionalGeneration"
LEAST = 8


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have few rows expanded, by the reference. Holds for each call whether all sequences began."""
    calls: list[bool] = []

    def expands(own: Tensor, shared_dim: int, value_dim: int, batch: Batch, **_: Any) -> bool:
        return own.shape[0] >= LEAST and batch.num_begun != 0 and batch.max_query_len > 1

    def noted(*args: Any, others: Tensor | None, **options: Any) -> Tensor:
        calls.append(others is None)
        return expanded_latent_attention(*args, others=others, **options)

    monkeypatch.setattr(latent_attention, "expands_latents", expands)
    monkeypatch.setattr(latent_attention, "expanded_latent_attention", noted)
    return calls


@pytest.mark.parametrize("arch", LATENT)
def test_prompts_chunks_and_decodes_in_one_step(arch: str, tmp_path: Path, expanded: list[bool]) -> None:
    harness, reference = Harness(make_checkpoint(arch, tmp_path)), make_model(arch)
    first, second, third = (harness.sequence(prompt(n)) for n in (60, 45, 30))
    steps = [[(first, 33)], [(first, 20), (second, 40)], [(second, 1), (first, 6), (third, 29)]]
    for step in steps:
        starts = [sequence.num_computed for sequence, _ in step]
        for (sequence, count), start, logits in zip(step, starts, harness.run(step), strict=True):
            want = reference_logits(reference, sequence.tokens)[start : start + count]
            assert (logits[-count:] - want[-len(logits) :]).abs().max() < 1e-4
    assert expanded and not any(expanded), "the harness does not say how many begin"


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("arch", unless_long(LATENT[:1], LATENT))
def test_the_engine_answers_as_with_the_absorbed_form(
    arch: str, mode: str, tmp_path: Path, expanded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in graphs of any mixture, chunks, and prefixes that are found again."""
    folder = str(make_checkpoint(arch, tmp_path))
    prompts, params = workload(10, 5)
    prompts = [[token % 200 for token in tokens] for tokens in prompts]
    prompts += [prompts[0] + [7] * 20, prompts[-1] + [9] * 30]
    params += params[:2]
    sizes = {"piecewise_cuda_graph_max_tokens": 32} if mode == "FULL" else {}

    def answers() -> list[list[int]]:
        with LLM(folder, skip_tokenizer_init=True, cuda_graph_mode=mode, **SETTINGS, **sizes) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    got = answers()
    assert {True, False} == set(expanded), "steps of prompts alone, and others"
    monkeypatch.undo()
    count = len(expanded)
    assert answers() == got and len(expanded) == count


def test_attention_over_a_selection_is_left_alone(tmp_path: Path, expanded: list[bool]) -> None:
    harness = Harness(make_checkpoint(GLM, tmp_path))
    harness.run([(harness.sequence(prompt(30)), 30)])
    assert not expanded
