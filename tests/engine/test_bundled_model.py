"""The bundled model through the engine: its answers are transformers' answers, and bfloat16 hardly changes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import fork_ranks
from tests.whole import takes_long, unless_long
from weft import LLM, SamplingParams
from weft.assets import EVAL_PATH, MODEL_DIR, extract_answer
from weft.outputs import RequestOutput

SAMPLE = 20


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    """Every tenth problem of the evaluation, so all kinds are there."""
    lines = EVAL_PATH.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:: len(lines) // SAMPLE]][:SAMPLE]


@pytest.fixture(scope="module")
def float32() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32") as llm:
        yield llm


def test_greedy_answers_are_those_of_transformers(float32: LLM, problems: list[dict[str, Any]]) -> None:
    """One forward pass of transformers over prompt and answer: greedy decoding would have taken the same token at every
    position, the end of the answer included."""
    params, problems = SamplingParams(temperature=0.0, max_tokens=256), unless_long(problems[::4], problems)
    outputs = float32.chat([p["messages"] for p in problems], params, use_tqdm=False)
    reference = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    right = 0
    for problem, output in zip(problems, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "stop"
        with torch.inference_mode():
            logits = reference(torch.tensor([output.prompt_token_ids + answer])).logits[0]
        greedy = logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1)
        assert greedy.tolist() == answer, problem["id"]
        right += extract_answer(output.outputs[0].text) == problem["answer"]
    assert right >= 0.93 * len(problems)


def distance(exact: list[RequestOutput], rounded: list[RequestOutput]) -> tuple[float, float, int]:
    """Compare two runs' prompts at the places where the first run is sure. Return the share of equal best tokens, the
    mean KL divergence over the likeliest tokens, and the number of places."""
    same, divergence, count = 0, 0.0, 0
    for one, other in zip(exact, rounded, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        # What a user wrote cannot be predicted; what the model was trained to say can.
        for p, q in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert p is not None and q is not None
            first = min(p, key=lambda token: p[token].rank)
            if p[first].logprob >= math.log(0.5):
                same += q[first].rank == 1 if first in q else 0
                divergence += sum(math.exp(p[t].logprob) * (p[t].logprob - q[t].logprob) for t in p if t in q)
                count += 1
    return same / count, divergence / count, count


@takes_long
def test_bfloat16_hardly_changes_the_distribution(float32: LLM, problems: list[dict[str, Any]]) -> None:
    """Argmax agreement above 99% and KL divergence below 1e-3 (over the likeliest 20 tokens) on whole conversations."""
    prompts = [p["messages"] for p in problems[:6]]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    with LLM(device="cpu", dtype="bfloat16") as low:
        both = (llm.chat(prompts, params, use_tqdm=False) for llm in (float32, low))
        same, divergence, count = distance(*both)
    assert count > 1000
    assert same > 0.99
    assert divergence < 1e-3


@takes_long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_tokens": [64, 300]}, marks=takes_long),
        {"cuda_graph_mode": "FULL", "cuda_graph_bs": [1, 4], "piecewise_cuda_graph_tokens": [64, 300]},
        pytest.param({"enable_prefix_caching": False}, marks=takes_long),
        pytest.param({"tensor_parallel_size": 2}, marks=takes_long),
    ],
    ids=lambda settings: next(iter(map(str, settings.items()))),
)
def test_texts_do_not_depend_on_how_they_are_computed(
    float32: LLM, problems: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    """Equal texts in float32 under every graph mode, with the cache and without, on one rank and on two; and the second
    time, when the cache knows the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    messages = [p["messages"] for p in unless_long(problems[::10], problems[::5])]
    expected = [o.outputs[0].text for o in float32.chat(messages, params, use_tqdm=False)]
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 300}
    with fork_ranks(), LLM(device="cpu", dtype="float32", **(small | settings)) as llm:
        for _ in range(2):
            outputs = llm.chat(messages, params, use_tqdm=False)
            assert [o.outputs[0].text for o in outputs] == expected
        cached = [o.num_cached_tokens or 0 for o in outputs]
        assert all(cached) if settings.get("enable_prefix_caching", True) else not any(cached)
