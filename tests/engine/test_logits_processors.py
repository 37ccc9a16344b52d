"""Callables of the user between the model and sampling."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.whole import covering
from weft import LLM, SamplingParams
from weft.errors import RequestError

PROMPT = [5, 6, 7]


def params(*processors: Any, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | fields
    return SamplingParams(logits_processors=list(processors), **fields)


def only(token: int) -> Any:
    def processor(output: list[int], logits: Any) -> Any:
        logits[:] = -float("inf")
        logits[token] = 0.0
        return logits

    return processor


def test_two_and_three_arguments_in_order(llm: LLM) -> None:
    seen: list[Any] = []

    def count(prompt: list[int], output: list[int], logits: Any) -> Any:
        seen.append((prompt, output))
        return only(50 + len(output))(output, logits)

    (output,) = llm.generate([PROMPT], params(only(9), count), use_tqdm=False)
    assert output.outputs[0].token_ids == [50, 51, 52, 53, 54, 55]
    assert seen == [(PROMPT, list(range(50, 50 + i))) for i in range(6)]
    assert_idle(llm)


@pytest.mark.parametrize(("mode", "overlap"), covering(["NONE", "FULL"], [False, True], of=1))
def test_neighbours_are_not_changed(folder: Path, overlap: bool, mode: str) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    bound = params(lambda output, logits: only(60 + len(output))(output, logits), n=2)
    with LLM(str(folder), max_num_seqs=8, enable_overlap=overlap, cuda_graph_mode=mode) as engine:
        (alone,) = engine.generate([PROMPT], free, use_tqdm=False)
        first, both, last = engine.generate([PROMPT] * 3, [free, bound, free], use_tqdm=False)
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [o.token_ids for o in both.outputs] == [list(range(60, 66))] * 2


def test_while_steps_are_profiled(folder: Path, tmp_path: Path) -> None:
    with LLM(str(folder), profile_dir=str(tmp_path)) as engine:
        (output,) = engine.generate([PROMPT], params(only(9)), use_tqdm=False)
    assert output.outputs[0].token_ids == [9] * 6


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (plain,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1, logprobs=3), use_tqdm=False)
    llm.reset_prefix_cache()  # so that both compute the whole prompt, and round alike
    (bound,) = llm.generate([PROMPT], params(only(9), max_tokens=1, logprobs=3), use_tqdm=False)
    assert plain.outputs[0].logprobs is not None and bound.outputs[0].logprobs is not None
    top = list(plain.outputs[0].logprobs[0].items())
    assert bound.outputs[0].token_ids == [9]
    assert top[0] in bound.outputs[0].logprobs[0].items()


def fails(output: list[int], logits: Any) -> Any:
    if len(output) == 2:
        raise RuntimeError("broken on purpose")
    return logits


@pytest.mark.parametrize("processor", [fails, lambda output, logits: logits[:3] if len(output) == 2 else logits])
def test_one_that_fails_ends_its_request_alone(llm: LLM, processor: Any, caplog: pytest.LogCaptureFixture) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with caplog.at_level(logging.ERROR):
        bad, good = llm.generate([PROMPT] * 2, [params(processor), free], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) == 2
    assert good.outputs[0].finish_reason == "length" and len(good.outputs[0].token_ids) == 6
    assert "a logits processor failed" in caplog.text
    assert_idle(llm)


def test_what_is_no_callable_is_refused() -> None:
    with pytest.raises(RequestError, match="holds 3, which is not callable"):
        SamplingParams(logits_processors=[3])
    with pytest.raises(RequestError, match="give a list of callables"):
        SamplingParams(logits_processors=len)  # type: ignore[arg-type]
