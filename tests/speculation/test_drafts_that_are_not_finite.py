"""A draft whose computation is not finite changes no token, nor whether the request ends well."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters import install
from tests.engine.conftest import assert_idle
from tests.fp8_checkpoints import edit_tensors
from tests.late_device import LateDevice
from tests.tiny import make_checkpoint
from tests.whole import unless_long
from weft import LLM, SamplingParams
from weft.request import Request

BROKEN = 150
"""A token whose embedding is NaN; nothing ever samples it."""
ARCHITECTURES = ["Qwen3ForCausalLM", "Qwen3NextForCausalLM", "KimiLinearForCausalLM"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={BROKEN: -100.0})


@dataclass
class Broken:
    """Drafts the token whose embedding is NaN after a right or wrong one."""

    after: int

    def propose(self, request: Request, count: int) -> list[int]:
        return [*([7] * self.after), BROKEN][:count] if len(request.output_token_ids) >= 3 else []


def checkpoint(arch: str, folder: Path) -> Path:
    make_checkpoint(arch, folder, tie_word_embeddings=False)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors[name][BROKEN] = float("nan")

    edit_tensors(folder, change)
    return folder


@pytest.mark.parametrize(
    ("arch", "mode"),
    unless_long(
        [("Qwen3NextForCausalLM", "FULL")],
        product(
            [*ARCHITECTURES, "Lfm2ForCausalLM", "Qwen4ExpForCausalLM"],
            ["NONE", "FULL", "FULL_AND_PIECEWISE"],
        ),
    ),
)
def test_tokens_are_those_without_drafts(arch: str, mode: str, tmp_path: Path) -> None:
    folder = str(checkpoint(arch, tmp_path))
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "cpu_cache_gib": 0.05, "max_num_seqs": 3}
    prompts = [{"prompt_token_ids": [1, 2, 3, place, 5]} for place in range(10, 14)]
    with LLM(folder, cuda_graph_mode="NONE", **settings) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    for after, overlap in ((0, False), (1, True)):
        given = settings | {"cuda_graph_mode": mode, "speculative_config": speculation, "enable_overlap": overlap}
        given |= {} if mode == "NONE" else {"piecewise_cuda_graph_tokens": (4, 8, 16, 32)}
        with LLM(folder, **given) as llm:
            install(llm, Broken(after))
            if overlap:
                LateDevice(llm)
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(prompts)
            assert [output.outputs[0].token_ids for output in outputs] == want
            assert llm.stats().spec_decode_num_draft_tokens, "nothing was drafted"
            llm._core.scheduler.check()
            assert_idle(llm)


def test_an_abort_beside_a_retry_ends_the_request(tmp_path: Path) -> None:
    """Also one whose launched steps are still in flight when it is to be computed anew."""
    folder = str(checkpoint("Qwen3ForCausalLM", tmp_path))
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    with LLM(folder, device="cpu", skip_tokenizer_init=True, cpu_cache_gib=0.05, speculative_config=speculation) as llm:
        install(llm, Broken(0))
        name = llm.add_request({"prompt_token_ids": [1, 2, 3]}, PARAMS)
        for _ in range(40):
            if llm._core.scheduler.requests[0].no_drafts_because:
                break
            llm.step()
        assert llm.abort(name) is not None and llm.is_finished()
        assert_idle(llm)
