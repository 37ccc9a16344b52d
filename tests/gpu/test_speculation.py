"""Steps with drafts that follow one another on a GPU, without synchronisation. One test checks how bfloat16 changes
texts of verified drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.repetition import texts
from tests.gpu.test_churn import Churn
from tests.models.mtp_chain_reference import make_chain_checkpoint
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.speculation.conftest import make_repeating_checkpoint
from tests.speculation.test_chained_heads import Compared, prompts
from tests.speculation.test_following_steps import check_tokens, open_engines
from tests.speculation.test_heads import SETTINGS as HEAD_SETTINGS
from tests.speculation.test_heads import case, check_head
from tests.speculation.test_indexed_models import VERIFY
from tests.speculation.test_ngram import CONFIG, SETTINGS, Steps, check_repeating
from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("arch", ["Qwen3NextForCausalLM", *VERIFY])
def test_following_steps(arch: str, mode: str, tmp_path: Path) -> None:
    """Drafts right and wrong, ends inside of accepted runs, conversations that go on; memory changes hands between."""
    method = VERIFY.get(arch, "mtp")
    (make_mtp_checkpoint if method == "mtp" else make_checkpoint)(arch, tmp_path)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True}
    with open_engines(tmp_path, mode, method, language_model_only=True, **settings) as engines:
        Churn(engines.following)
        for stops in (False, True):
            check_tokens(engines, stops)


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_drafts_from_residual_streams(mode: str, tmp_path: Path) -> None:
    """The head of Qwen4-Exp, which the tests above do not run."""
    folder = make_repeating_checkpoint("Qwen4ExpForCausalLM", tmp_path, head=True)
    with LLM(str(folder), **HEAD_SETTINGS | {"device": "cuda"}) as plain:
        expected = case().run(plain)
    check_head(folder, expected, 3, mode, device="cuda")


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL"])
@pytest.mark.parametrize("repeats", [False, True])
def test_drafts_of_a_layer_each(mode: str, repeats: bool, tmp_path: Path) -> None:
    """Every draft is the reference's, so that no state of the head is that of rejected tokens or of other drafts."""
    folder, reference = make_chain_checkpoint("InklingForCausalLM", tmp_path, repeats=repeats, rel_extent=128)
    engine = Compared(folder, reference, cuda_graph_mode=mode, device="cuda")
    with engine.llm as llm:
        Churn(llm)
        engine.run(prompts(1, 61, 70, 7), 30)
        assert engine.count > 30 and (llm.stats().spec_decode_num_accepted_tokens > 20) == repeats


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL"])
def test_ngram_drafts(mode: str, tmp_path: Path) -> None:
    folder = str(make_repeating_checkpoint("Qwen3NextForCausalLM", tmp_path))
    settings: dict[str, Any] = SETTINGS | {"device": "cuda", "dtype": "float32", "num_kv_pages": 200}
    overlap: dict[str, Any] = {"enable_overlap": True, "cuda_graph_mode": mode}
    with LLM(folder, **settings) as plain, LLM(folder, speculative_config=CONFIG, **overlap, **settings) as drafting:
        Churn(drafting)
        check_repeating(plain, drafting, Steps(drafting))


def test_texts_differ_in_bfloat16_only_where_logits_nearly_tie() -> None:
    """In float32 drafts change no token; in bfloat16 a verification rounds sums otherwise than a decode."""
    for row in texts("cuda"):
        if row["dtype"] == "float32":
            assert row["same_tokens"], row
        elif not row["same_tokens"]:
            assert row["gap"] <= 4 * row["ulp"], row


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_no_step_waits_for_the_device(method: str, tmp_path: Path) -> None:
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":  # one token nearly always stood before
        config |= {"prompt_lookup_min": 1}
    settings: dict[str, Any] = {"device": "cuda", "max_num_seqs": 4, "max_model_len": 512, "skip_tokenizer_init": True}
    with LLM(str(folder), **settings, speculative_config=config) as llm:
        params = SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True, detokenize=False)
        for _ in range(4):
            llm.add_request({"prompt_token_ids": list(range(3, 200))[:: 1 if method == "ngram" else 10]}, params)
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
