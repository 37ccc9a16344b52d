"""Prompts whose latents are expanded: the answers of the absorbed form, in any steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Harness
from tests.models.test_parity import prompt, reference_logits
from tests.runner.test_step_graphs import SETTINGS, workload
from tests.tiny import make_checkpoint, make_model
from tests.whole import unless_long
from weft import LLM
from weft.forward_context import Batch
from weft.layers import latent_attention
from weft.ops.attention import Expansion, expanded_latent_attention
from weft.ops.backend import Backend

LATENT = ["KimiLinearForCausalLM", "BailingHybridForCausalLM"]
GLM = "Glm5NextForConditionalGeneration"
LEAST, PAYS = 8, 12


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Have few rows expanded, by the reference. Holds for each call whether the host knows that no sequence is left for
    the absorbed form but those that decode, and whether any does."""
    calls: list[tuple[bool, bool]] = []

    def plan(own: Tensor, shared_dim: int, value_dim: int, batch: Batch, **_: Any) -> Expansion | None:
        if own.shape[0] < LEAST or batch.max_query_len == 1 or batch.verification is not None:
            return None
        query_lens, decodes = batch.cu_seqlens_q.diff(), batch.num_decodes
        if batch.mixed is not None:
            decodes = batch.mixed.counts[2]  # type: ignore[assignment]
        pays = (query_lens == batch.seq_lens) | (query_lens >= PAYS)
        chosen = pays & (torch.arange(len(query_lens)) >= decodes)
        is_whole = batch.mixed is None and batch.least_chunk is not None and batch.least_chunk >= PAYS
        return Expansion(batch.seq_lens * chosen, torch.where(chosen, query_lens, batch.seq_lens), is_whole)

    def noted(*args: Any, **options: Any) -> Tensor:
        batch, expansion = args[-2:]
        calls.append((expansion.is_whole, batch.num_decodes > 0))
        return expanded_latent_attention(*args, **options)

    monkeypatch.setattr(latent_attention, "plan_expansion", plan)
    monkeypatch.setattr(latent_attention, "expanded_latent_attention", noted)
    return calls


@pytest.mark.parametrize("arch", LATENT)
def test_prompts_chunks_and_decodes_in_one_step(arch: str, tmp_path: Path, expanded: list[tuple[bool, bool]]) -> None:
    harness, reference = Harness(make_checkpoint(arch, tmp_path)), make_model(arch)
    first, second, third = (harness.sequence(prompt(n)) for n in (60, 45, 30))
    steps = [[(first, 33)], [(first, 20), (second, 40)], [(second, 1), (first, 6), (third, 29)]]
    for step in steps:
        starts = [sequence.num_computed for sequence, _ in step]
        for (sequence, count), start, logits in zip(step, starts, harness.run(step), strict=True):
            want = reference_logits(reference, sequence.tokens)[start : start + count]
            assert (logits[-count:] - want[-len(logits) :]).abs().max() < 1e-4
    assert expanded and not any(is_whole for is_whole, _ in expanded), "the harness does not say what the host knows"


@pytest.mark.parametrize("mode", unless_long(["FULL"], ["NONE", "FULL"]))
@pytest.mark.parametrize("arch", unless_long(LATENT[:1], LATENT))
def test_the_engine_answers_as_with_the_absorbed_form(
    arch: str, mode: str, tmp_path: Path, expanded: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
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
    kinds = {(False, False)} if mode == "FULL" else {(True, False), (True, True), (False, True)}
    assert kinds <= set(expanded), "steps of prompts alone, beside decodes, and with short chunks"
    monkeypatch.undo()
    count = len(expanded)
    assert answers() == got and len(expanded) == count


@pytest.mark.gpu
@pytest.mark.parametrize("arch", LATENT)
def test_both_forms_agree_on_the_gpu(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, and then its next chunk beside another prompt; the absorbed form has the same logits."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    found = both_forms(arch, tmp_path, monkeypatch, dtype=torch.bfloat16, device="cuda", backend=Backend.TRITON)
    for got, want in found:
        assert ((got - want).norm() / want.norm()).item() < 0.05


def both_forms(arch: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Tensor, Tensor]]:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    make_checkpoint(arch, folder, max_position_embeddings=1024, **sizes)
    called: list[Any] = []

    def noted(*args: Any, **options: Any) -> Tensor:
        called.append(args)
        return expanded_latent_attention(*args, **options)

    def logits() -> list[Tensor]:
        harness = Harness(folder, num_pages=200, **options)
        first, second = harness.sequence(prompt(900)), harness.sequence(prompt(610))
        steps = [[(first, 600)], [(first, 20), (second, 610)], [(first, 280)]]
        return [row for step in steps for row in harness.run(step)]

    monkeypatch.setattr(latent_attention, "expanded_latent_attention", noted)
    got = logits()
    assert len(called) % 3 == 0 and called, "the steps are large enough"
    monkeypatch.setattr(latent_attention, "plan_expansion", lambda *_, **__: None)
    return [(a.float().cpu(), b.float().cpu()) for a, b in zip(got, logits(), strict=True)]


def test_attention_over_a_selection_is_left_alone(tmp_path: Path, expanded: list[tuple[bool, bool]]) -> None:
    harness = Harness(make_checkpoint(GLM, tmp_path))
    harness.run([(harness.sequence(prompt(30)), 30)])
    assert not expanded
