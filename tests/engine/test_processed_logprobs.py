"""Processed log probabilities are those of a plain computation from transformers' logits, however tokens are drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine import simulator
from tests.engine.conftest import HYBRID
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.ranks import fork_ranks
from tests.tiny import make_model
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from tests.whole import unless_long
from weft.engine.llm import LLM
from weft.errors import ConfigError, RequestError
from weft.outputs import RequestOutput
from weft.sampling_params import SamplingParams

PROMPTS = [[(13 * i + 5 * n) % VOCAB_SIZE for i in range(n)] for n in (2, 30, 63, 65, 40, 50)]
ALLOWED = [5, 8]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_p": 0.3, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.8, "logprobs": 0},
    {"temperature": 1.4, "top_k": 5, "min_p": 0.05, "logprobs": 5},
    {"temperature": 0.9, "presence_penalty": 0.6, "repetition_penalty": 1.3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "logit_bias": {8: 3.0}, "allowed_token_ids": ALLOWED, "top_k": 9, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.5},
]
GRAPHS = {"cuda_graph_bs": (1, 6), "enable_torch_compile_debug_mode": True}
PIECES = {"piecewise_cuda_graph_tokens": (8, 256), "enable_torch_compile_debug_mode": True}
HEAD = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
NGRAMS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}}
CASES: dict[str, dict[str, Any]] = {
    "NONE": {"cuda_graph_mode": "NONE"},
    "PIECEWISE": {"cuda_graph_mode": "PIECEWISE"} | PIECES,
    "FULL": {"cuda_graph_mode": "FULL"} | GRAPHS,
    "accepted drafts": {"cuda_graph_mode": "NONE"} | NGRAMS,
    "accepted drafts in graphs": {"cuda_graph_mode": "FULL"} | GRAPHS | NGRAMS,
    "head in graphs": {"cuda_graph_mode": "FULL"} | GRAPHS | HEAD,
    "two ranks": {"tensor_parallel_size": 2},
}
PROCESSED: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_model(HYBRID, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a head that drafts."""
    given = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "with_tokenizer": True}
    return make_mtp_checkpoint(HYBRID, tmp_path_factory.mktemp("drafting"), **given)[0]


def answers(folder: Path, num_tokens: int = 12, **settings: Any) -> list[RequestOutput]:
    params = [SamplingParams(seed=i, max_tokens=num_tokens, ignore_eos=True, **given) for i, given in enumerate(PARAMS)]
    with LLM(str(folder), max_num_seqs=6, **settings) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def expected(reference: Any, prompt: list[int], output: list[int], given: dict[str, Any]) -> list[float]:
    """Log probabilities of the vocabulary after ``output``."""
    logits = simulator.next_logits(reference, [*prompt, *output])
    for token, value in given.get("logit_bias", {}).items():
        logits[token] += value
    names = ("repetition", "frequency", "presence")
    penalties = {name: given[f"{name}_penalty"] for name in names if f"{name}_penalty" in given}
    logits = simulator.penalised(logits, prompt, output, **penalties)
    if "allowed_token_ids" in given:
        logits = [x if token in ALLOWED else -1e9 for token, x in enumerate(logits)]
    filters = {name: given[name] for name in ("top_k", "top_p", "min_p") if name in given}
    is_greedy = given["temperature"] == 0
    shares = simulator.filtered(logits, 1.0 if is_greedy else given["temperature"], **({} if is_greedy else filters))
    return [math.log(p) if p else -math.inf for p in shares]


@pytest.mark.parametrize("case", unless_long(["accepted drafts in graphs"], CASES))
def test_they_are_those_of_the_sampled_distribution(case: str, folder: Path, drafting: Path, reference: Any) -> None:
    with fork_ranks():
        outputs = answers(drafting if "head" in case else folder, **CASES[case], **PROCESSED)
    for output, given in zip(outputs, PARAMS, strict=True):
        completion = output.outputs[0]
        if "logprobs" not in given:
            assert completion.logprobs is None
            continue
        assert completion.logprobs is not None and len(completion.logprobs) == 12
        for place, entry in enumerate(completion.logprobs):
            want = expected(reference, output.prompt_token_ids, list(completion.token_ids[:place]), given)
            assert len(entry) in (given["logprobs"], given["logprobs"] + 1) and completion.token_ids[place] in entry
            for token, found in entry.items():
                assert found.logprob == pytest.approx(want[token], abs=1e-4), (place, token)
    if "drafts" in case:
        assert any(output.metrics.num_accepted_tokens for output in outputs if output.metrics)


def test_the_modes_differ_and_draw_the_same_tokens(folder: Path) -> None:
    raw, processed = answers(folder), answers(folder, **PROCESSED)
    for i, (one, other) in enumerate(zip(raw, processed, strict=True)):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        if "logprobs" in PARAMS[i]:
            assert one.outputs[0].cumulative_logprob != pytest.approx(other.outputs[0].cumulative_logprob, abs=0.01)


def test_what_is_refused(folder: Path) -> None:
    for mode in ("raw_logits", "processed_logits"):
        with pytest.raises(ConfigError, match=f"{mode}.*raw_logprobs"):
            LLM(str(folder), logprobs_mode=mode)
    with pytest.raises(ConfigError, match="deterministic=True is not possible with logprobs_mode"):
        LLM(str(folder), deterministic=True, **PROCESSED)
    with LLM(str(folder), max_num_seqs=1, **PROCESSED) as llm:
        edit = SamplingParams(max_tokens=1, logprobs=0, logits_processors=[lambda tokens, logits: logits])
        with pytest.raises(RequestError, match="logprobs with logits_processors need logprobs_mode='raw_logprobs'"):
            llm.generate(PROMPTS[0], edit, use_tqdm=False)
