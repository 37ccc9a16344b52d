"""Greedy output of the whole engine is that of transformers, however the work is cut and whoever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import HYBRID, assert_idle
from tests.test_x_matrix_layers import COLUMNS, VARIANTS
from tests.tiny import ARCHITECTURES, make_model
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from tests.whole import takes_long, unless_long
from weft.engine.llm import LLM
from weft.outputs import RequestOutput
from weft.sampling_params import SamplingParams

LENGTHS = (1, 63, 64, 65, 130, 210)
TEXT_MODELS = tuple(arch for arch in ARCHITECTURES if arch.endswith("ForCausalLM"))
ELSEWHERE = {"MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *(arch for arch, _ in COLUMNS + VARIANTS)}
"""Families whose preempted and chunked requests ``tests/test_x_matrix_layers.py`` runs everywhere, and those with the
layers of Llama."""
STEPS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{length} {seed} {i}").randrange(VOCAB_SIZE) for i in range(length)]


def reference_of(arch: str) -> Any:
    return make_model(arch, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def is_greedy(reference: Any, asked: list[int], got: list[int]) -> bool:
    """Whether every token is the reference's argmax after its predecessors, which is what greedy decoding means."""
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([asked + got]), use_cache=False).logits[0]
    return logits[len(asked) - 1 : -1].argmax(-1).tolist() == got


@pytest.mark.parametrize("arch", unless_long([a for a in TEXT_MODELS if a not in ELSEWHERE][::2], TEXT_MODELS))
def test_together_in_chunks_and_preempted(arch: str, folder_of: Callable[[str], Path]) -> None:
    reference = reference_of(arch)
    prompts = [prompt(n) for n in LENGTHS]
    with LLM(str(folder_of(arch))) as llm:
        together = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
        assert_idle(llm)
    assert all(len(got) == STEPS for got in together)
    assert [is_greedy(reference, p, got) for p, got in zip(prompts, together, strict=True)] == [True] * len(prompts)
    # 28 pages of 9 tokens hold the longest request and little else; 37 tokens a step cut every long prompt
    settings: dict[str, Any] = {"max_num_batched_tokens": 37, "max_num_seqs": 5, "page_size": 9, "num_kv_pages": 29}
    if arch.startswith("Qwen4"):  # whose pages hold whole pools of 4
        settings |= {"page_size": 8, "num_kv_pages": 33}
    with LLM(str(folder_of(arch)), **settings) as llm:
        outputs = llm.generate(prompts[::-1], GREEDY, use_tqdm=False)
        assert tokens(outputs)[::-1] == together
        assert_idle(llm)


def test_one_at_a_time_equals_together(llm: LLM) -> None:
    prompts = [prompt(n, seed=1) for n in LENGTHS]
    alone = [tokens(llm.generate(p, GREEDY, use_tqdm=False))[0] for p in prompts]
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == alone


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", HYBRID])
def test_equals_transformers_generate_with_its_end_of_text(arch: str, folder_of: Callable[[str], Path]) -> None:
    """Five ends of text, so that some answers end early: both stop there and keep the end token."""
    reference, asked = reference_of(arch), [prompt(n, seed=2) for n in (1, 17, 64)]
    with LLM(str(folder_of(arch))) as llm:
        free = tokens(
            llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
        )
        ends = sorted({EOS_ID, free[0][5], free[1][11]})
        params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=ends)
        got = tokens(llm.generate(asked, params, use_tqdm=False))
    for p, output in zip(asked, got, strict=True):
        want = reference.generate(
            torch.tensor([p]), max_new_tokens=24, do_sample=False, eos_token_id=ends, pad_token_id=0, use_cache=False
        )
        assert output == want[0, len(p) :].tolist()
    assert min(len(output) for output in got) < 24


@pytest.mark.parametrize(("seqs", "budget"), unless_long([(4, 5)], [(1, 1), (1, 64), (3, 3), (4, 5)]))
def test_the_smallest_budgets(folder: Path, llm: LLM, seqs: int, budget: int) -> None:
    prompts = [prompt(n, seed=4) for n in (1, 17, 3, 9, 2)]
    want = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    with LLM(str(folder), max_num_seqs=seqs, max_num_batched_tokens=budget) as small:
        assert tokens(small.generate(prompts, GREEDY, use_tqdm=False)) == want


@pytest.mark.parametrize("policy", ["fcfs", pytest.param("priority", marks=takes_long)])
def test_a_cache_far_too_small_for_the_load(folder: Path, llm: LLM, policy: str) -> None:
    count, num_tokens = unless_long([(8, 24)], [(12, 40)])[0]
    prompts = [prompt(5 + 7 * i, seed=3) for i in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    want = tokens(llm.generate(prompts, params, use_tqdm=False))
    with LLM(str(folder), page_size=8, num_kv_pages=20, max_num_seqs=8, schedule_policy=policy) as small:
        outputs = small.generate(prompts, params, use_tqdm=False, priority=[i % 3 for i in range(count)])
        assert tokens(outputs) == want
        assert small.stats().num_preemptions > 0
        assert sum(o.metrics.num_preemptions for o in outputs) == small.stats().num_preemptions
        assert_idle(small)


def test_requests_are_served_in_order_of_arrival_also_after_a_preemption(folder: Path) -> None:
    """Equal requests finish in their order of arrival, although later requests are preempted."""
    ended: list[str] = []
    with LLM(str(folder), page_size=4, num_kv_pages=24, max_num_seqs=4) as llm:
        for i in range(8):
            llm.add_request(prompt(20, seed=i), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), str(i))
        while not llm.is_finished():
            ended += [output.request_id for output in llm.step() if output.finished]
        assert llm.stats().num_preemptions > 0
    assert ended == sorted(ended)


@takes_long
@pytest.mark.parametrize("seed", unless_long([0], range(3)))
def test_fuzz_of_arrivals_and_aborts(cramped: LLM, llm: LLM, seed: int) -> None:
    """Random arrivals, lengths and aborts, checked after every step; whoever ends gives what it gives alone."""
    rng = random.Random(seed)
    asked: dict[str, tuple[list[int], int]] = {}
    done: dict[str, list[int]] = {}
    cut: dict[str, list[int]] = {}
    while len(asked) < 14 or not cramped.is_finished():
        if len(asked) < 14 and rng.random() < 0.5:
            name = f"{seed}-{len(asked)}"
            asked[name] = (prompt(rng.choice([1, 3, 40, 63, 64, 65, 100]), seed), rng.randint(1, 30))
            cramped.add_request(asked[name][0], params_of(asked[name][1]), name)
        running = [name for name in asked if name not in done and name not in cut]
        if running and rng.random() < 0.06:
            name = rng.choice(running)
            output = cramped.abort(name)
            assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
            cut[name] = output.outputs[0].token_ids
            cramped._core.scheduler.check()
        for output in cramped.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
        cramped._core.scheduler.check()
    assert_idle(cramped)
    assert cut and len(done) + len(cut) == len(asked)
    names = list(asked)
    outputs = llm.generate([asked[n][0] for n in names], [params_of(asked[n][1]) for n in names], use_tqdm=False)
    for name, want in zip(names, tokens(outputs), strict=True):
        assert done.get(name, want) == want
        assert cut.get(name, []) == want[: len(cut.get(name, []))]


def params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
