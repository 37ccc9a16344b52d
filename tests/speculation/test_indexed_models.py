"""Drafts from the text in layers that decay by channel, index, convolve, share blocks or have a bias: rejected drafts
leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.mtp_reference import make_mtp_checkpoint
from tests.ranks import fork_ranks
from tests.speculation.conftest import make_repeating_checkpoint
from tests.speculation.test_following_steps import check_tokens, open_engines
from tests.speculation.test_heads import HEADS, SETTINGS, case, check_head
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("Glm5NextForConditionalGeneration", marks=takes_long),  # CI: test_heads.py
        pytest.param("Qwen4ExpForCausalLM", marks=takes_long),
        pytest.param("Zamba2ForCausalLM", marks=takes_long),
        "ZayaForCausalLM",
        pytest.param("InklingForCausalLM", marks=takes_long),
        pytest.param("Inkling2ForCausalLM", marks=takes_long),
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


VERIFY = {
    "KimiLinearForCausalLM": "ngram",
    "BailingHybridForCausalLM": "mtp",
    "Glm5NextForConditionalGeneration": "mtp",
    "Qwen4ExpForCausalLM": "mtp",
    "Lfm2ForCausalLM": "ngram",
}
"""Families whose layers verify, and what drafts."""


@takes_long
@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("arch", VERIFY)
def test_layers_that_verify(arch: str, mode: str, tmp_path: Path) -> None:
    """Three of four drafts are right. No token changes, although verifications follow one another before anybody knows
    what was accepted, requests are preempted, and second turns begin with cached states."""
    make = make_mtp_checkpoint if VERIFY[arch] == "mtp" else make_checkpoint
    make(arch, tmp_path, with_tokenizer=True)
    with open_engines(tmp_path, mode, VERIFY[arch], num_kv_pages=32, language_model_only=True) as engines:
        for stops in (False, True):
            check_tokens(engines, stops)
        stats = engines.following.stats()
        assert engines.following.config.verifies and stats.num_preemptions and stats.num_hit_tokens


@takes_long
@pytest.mark.parametrize("arch", HEADS[-3:])
def test_heads_on_two_ranks(arch: str, tmp_path: Path) -> None:
    folder = make_repeating_checkpoint(arch, tmp_path, head=True)
    with LLM(str(folder), **SETTINGS) as plain:
        expected = case().run(plain)
    with fork_ranks():
        check_head(folder, expected, 2, "FULL_DECODE_ONLY", tensor_parallel_size=2)
