"""A grammar masks every position of a step that verifies drafts, and gives the text that it gives without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.drafters import FromOutputs, Random, install
from tests.engine.conftest import assert_idle
from tests.speculation.conftest import CONFIG, Case
from tests.whole import RUNS_LONG, takes_long
from weft import LLM, SamplingParams, StructuredOutputsParams

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "cpu_cache_gib": 0.1}
PROMPTS = ["A list of words:", "Say it again:", "How many?"]
GRAMMARS = [
    StructuredOutputsParams(regex="(red|green|blue)(, (red|green|blue)){6}"),
    StructuredOutputsParams(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    None,
]


@pytest.mark.parametrize("mode", [pytest.param("NONE", marks=takes_long), "FULL"])
def test_the_text_is_that_without_drafts(mode: str) -> None:
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, structured_outputs=grammar)
        for i, (grammar, t) in enumerate(zip(GRAMMARS, (0.8, 0.0, 0.0), strict=True))
    ]
    with LLM(**SETTINGS) as plain:
        tokenizer = plain.tokenizer
        assert tokenizer is not None
        case = Case([tokenizer.encode(prompt) for prompt in PROMPTS], params)
        expected = case.run(plain)
    known = case.known(expected)
    sizes = {"piecewise_cuda_graph_tokens": [16]} if mode == "FULL" else {}
    with LLM(**SETTINGS, **sizes, cuda_graph_mode=mode, speculative_config=CONFIG) as drafting:
        drafters = {
            "right": FromOutputs(known),
            "now and then": FromOutputs(known, lambda place, rng: rng.random() < 0.3),
            "random": Random(random.Random(1)),
        }
        for name, drafter in list(drafters.items())[0 if RUNS_LONG else 1 : 3 if RUNS_LONG else 2]:
            install(drafting, drafter)
            before = drafting.stats().spec_decode_num_accepted_tokens
            assert [(d.text, d.finish_reason) for d in case.run(drafting)] == [
                (e.text, e.finish_reason) for e in expected
            ], name
            assert name == "random" or drafting.stats().spec_decode_num_accepted_tokens > before
        assert_idle(drafting)
