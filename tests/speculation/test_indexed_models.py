"""Drafts from the text where layers index, convolve, share blocks or have a bias: rejected drafts leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("Glm5NextForConditionalGeneration", marks=takes_long),  # CI: test_heads.py
        pytest.param("Qwen4ExpForCausalLM", marks=takes_long),
        "Zamba2ForCausalLM",
        "ZayaForCausalLM",
        pytest.param("InklingForCausalLM", marks=takes_long),
        "Inkling2ForCausalLM",
    ],
)
def test_tokens_are_those_without_drafts(arch: str, tmp_path: Path) -> None:
    folder, tokens = make_checkpoint(arch, tmp_path), []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for speculation in (None, NGRAM):
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "speculative_config": speculation,
        }
        with LLM(str(folder), **settings) as llm:
            prompts = [{"prompt_token_ids": ([3, 8, 9, 11] * 20)[:n]} for n in (30, 61, 77)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]
