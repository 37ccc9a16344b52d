"""A preempted request goes on as if nothing had happened, whatever it asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.whole import covering
from weft import LLM, RequestOutput, SamplingParams

PROMPT = [40 + i % 50 for i in range(30)]

EXPECTED: dict[str, RequestOutput] = {}
"""Outputs of requests that are not preempted, by what they ask for."""


def run(folder: Path, params: SamplingParams, preempted_after: int | None) -> RequestOutput:
    """The output of one request, preempted by hand once it has so many tokens."""
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=12, enable_overlap=False) as llm:
        llm.add_request({"prompt_token_ids": PROMPT}, params)
        (stream,) = llm._streams.values()
        output: RequestOutput | None = None
        while not llm.is_finished():
            output = next(iter(llm.step()), output)
            if preempted_after is not None and len(stream.requests[0].output_token_ids) == preempted_after:
                scheduler, preempted_after = llm._core.scheduler, None
                scheduler._preempt(scheduler._rows.running[0])
        assert output is not None
        assert_idle(llm)
        return output


ASKED: list[dict[str, Any]] = [
    {"prompt_logprobs": 1, "logprobs": 2},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.6},
    {"temperature": 1.0, "seed": 5},
    {"bad_words": ["the", "a"], "min_tokens": 9},
]


@pytest.mark.parametrize(
    ("asked", "after"), covering(ASKED, [0, 1, 7], of=1), ids=lambda v: next(iter(v)) if isinstance(v, dict) else str(v)
)
def test_a_preempted_request_goes_on(folder: Path, asked: dict[str, Any], after: int) -> None:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | asked))
    if str(asked) not in EXPECTED:
        EXPECTED[str(asked)] = run(folder, params, None)
    expected, given = EXPECTED[str(asked)], run(folder, params, after)
    assert (expected.metrics.num_preemptions, given.metrics.num_preemptions) == (0, 1)
    assert given.outputs[0].token_ids == expected.outputs[0].token_ids
    if params.prompt_logprobs is not None:
        assert expected.prompt_logprobs is not None and given.prompt_logprobs is not None
        assert [list(e or ()) for e in given.prompt_logprobs] == [list(e or ()) for e in expected.prompt_logprobs]
        assert len(given.prompt_logprobs) == len(PROMPT) and len(given.outputs[0].logprobs or ()) == 16
