"""Drafts of the model's own head on a GPU: steps that follow one another, and no synchronisation between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_churn import Churn
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.speculation.test_following_steps import check_tokens, open_engines
from weft import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_following_steps(mode: str, tmp_path: Path) -> None:
    """Drafts right and wrong, ends inside of accepted runs, conversations that go on; memory changes hands between."""
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    with open_engines(folder, mode, device="cuda", dtype="float32") as engines:
        Churn(engines.following)
        for stops in (False, True):
            check_tokens(engines, stops)


def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    settings: dict[str, Any] = {"device": "cuda", "max_num_seqs": 4, "max_model_len": 256, "skip_tokenizer_init": True}
    with LLM(str(folder), **settings, speculative_config=config) as llm:
        params = SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True, detokenize=False)
        for i in range(4):
            llm.add_request({"prompt_token_ids": [7 + i] * 20}, params)
        for _ in range(6):
            llm.step()
        launch, followed = llm._core._executor.launch, []

        def launch_strictly(step: Any, *arguments: Any) -> None:
            followed.append(all(request.follows for request in step.requests))
            torch.cuda.set_sync_debug_mode("error")
            try:
                launch(step, *arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm._core._executor.launch = launch_strictly  # type: ignore[method-assign]
        for _ in range(12):
            llm.step()
        assert sum(followed) > 8, followed
        while not llm.is_finished():
            llm.step()
