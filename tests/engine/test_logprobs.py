"""Reported log probabilities are those of transformers, however the prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import simulator
from tests.engine.conftest import HYBRID
from tests.tiny import make_model
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from weft.engine.llm import LLM
from weft.errors import RequestError
from weft.outputs import LogprobsDict, RequestOutput
from weft.sampling_params import SamplingParams

PROMPTS = [[(13 * i + 5 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 2, 63, 65, 100)]


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_model(HYBRID, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)


NEAR = 1e-5
"""Two log probabilities closer than this may stand in either order: processors round sums differently."""


def check_entry(entry: LogprobsDict, token: int, want: torch.Tensor, top_n: int) -> None:
    """``entry`` holds ``token`` first and the ``top_n`` likeliest, with ranks, in order."""
    likeliest = [t for t in want.topk(top_n).indices.tolist() if t != token] if top_n else []
    first, *others = entry
    assert first == token and len(others) == len(likeliest)
    assert not others or (want[others] - want[likeliest]).abs().max() < NEAR
    for t, logprob in entry.items():
        assert abs(logprob.logprob - want[t].item()) < 1e-4
        above, not_below = (int((want > want[t] + side).sum()) for side in (NEAR, -NEAR))
        assert logprob.rank is not None and above < logprob.rank <= not_below


def check(output: RequestOutput, reference: Any, top_n: int, prompt_n: int | None) -> None:
    completion, prompt = output.outputs[0], output.prompt_token_ids
    want = simulator.log_probs(reference, prompt + completion.token_ids)
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    for i, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        check_entry(entry, token, want[len(prompt) - 1 + i], top_n)
    assert completion.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    if prompt_n is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        check_entry(entry, prompt[i], want[i - 1], prompt_n)


def params_of(i: int) -> SamplingParams:
    """Different wishes side by side; sampled and edited rows report the model's own probabilities."""
    return SamplingParams(
        temperature=(0.0, 1.2)[i % 2],
        seed=i,
        max_tokens=14,
        ignore_eos=True,
        logprobs=(3, 0, 20, 1, 5)[i],
        prompt_logprobs=(2, 0, None, 20, 4)[i],
        logit_bias={8: 2.0} if i == 3 else None,
        frequency_penalty=0.5 if i == 1 else 0.0,
    )


def test_of_generated_and_prompt_tokens(llm: LLM, reference: Any) -> None:
    outputs = llm.generate(PROMPTS, [params_of(i) for i in range(5)], use_tqdm=False)
    for i, output in enumerate(outputs):
        check(output, reference, params_of(i).logprobs or 0, params_of(i).prompt_logprobs)


def test_in_chunks_and_preempted(cramped: LLM, reference: Any) -> None:
    before = cramped.stats().num_preemptions
    outputs = cramped.generate(PROMPTS[::-1], [params_of(4 - i) for i in range(5)], use_tqdm=False)
    assert cramped.stats().num_preemptions > before
    for i, output in enumerate(outputs):
        check(output, reference, params_of(4 - i).logprobs or 0, params_of(4 - i).prompt_logprobs)


def test_snapshots_hold_all_that_is_known(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    want = llm.generate(PROMPTS[2], params, use_tqdm=False)[0]
    llm.add_request(PROMPTS[2], params)
    lengths = []
    while not llm.is_finished():
        (output,) = llm.step()
        assert output.prompt_logprobs == want.prompt_logprobs
        assert output.outputs[0].logprobs == want.outputs[0].logprobs[: len(output.outputs[0].token_ids)]
        lengths.append(len(output.outputs[0].logprobs))
    assert lengths == [1, 2, 3, 4, 5]


def test_none_unless_asked_for(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, logprobs=0)]
    silent, asked = llm.generate([[5, 6]] * 2, params, use_tqdm=False)
    assert (silent.outputs[0].logprobs, silent.outputs[0].cumulative_logprob, silent.prompt_logprobs) == (
        None,
        None,
        None,
    )
    assert asked.outputs[0].logprobs is not None and [len(e) for e in asked.outputs[0].logprobs] == [1, 1, 1]


def test_decoded_tokens_and_no_entries_after_a_stop_string(llm: LLM) -> None:
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)[
        0
    ].outputs[0]
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    stop = next(t for t in (tokenizer.decode([i]) for i in free.token_ids[5:]) if "\N{REPLACEMENT CHARACTER}" not in t)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, stop=stop)
    output = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert output.stop_reason == stop and output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) < 20
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token].decoded_token == tokenizer.decode([token], skip_special_tokens=False)


def test_max_logprobs(llm: LLM, folder: Path, reference: Any) -> None:
    wish = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=30)
    with pytest.raises(RequestError, match=r"logprobs=-1 is more than the 20 log probabilities .* raise max_logprobs"):
        llm.generate(PROMPTS[2], wish, use_tqdm=False)
    with LLM(str(folder), max_logprobs=-1) as unlimited:
        output = unlimited.generate(PROMPTS[2], wish, use_tqdm=False)[0]
    check(output, reference, VOCAB_SIZE, 30)
    assert len((output.outputs[0].logprobs or [{}])[0]) == VOCAB_SIZE
