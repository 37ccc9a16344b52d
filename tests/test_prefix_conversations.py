"""A conversation goes on after every kind of end, with and without overlap: right, and from exactly what was fed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import pytest

from tests.engine.conftest import assert_idle
from tests.tiny import make_checkpoint
from tests.whole import unless_long
from weft import LLM, SamplingParams
from weft.outputs import RequestOutput

PROMPT = [(7 * i + i // 5) % 200 for i in range(70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("tiny"), with_tokenizer=True)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture
def cached(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), enable_overlap=request.param) as llm:
        yield llm
        assert_idle(llm)


def generate(llm: LLM, prompt: list[int], **settings: object) -> RequestOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | settings)  # type: ignore[arg-type]
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def abort_after(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """The tokens that were known when the request was aborted."""
    request_id = llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while True:
        for output in llm.step():
            if len(tokens(output)) >= count:
                aborted = llm.abort(request_id)
                assert aborted is not None
                return tokens(aborted)


ENDS = ["length", "stop token", "stop string", "abort", "abort before a token"]


@pytest.mark.parametrize(
    ("cached", "end"),
    unless_long([*zip(cycle([True, False]), ENDS[::2], strict=False)], product([False, True], ENDS)),
    indirect=["cached"],
)
def test_conversation_goes_on(cached: LLM, cold: LLM, end: str) -> None:
    history = PROMPT
    for turn in range(3):
        expected = generate(cold, history)
        if end == "abort":
            answer = abort_after(cached, history, 5)
        elif end == "abort before a token":
            answer = []
            request_id = cached.add_request(history)
            cached.step()
            cached.abort(request_id)
        else:
            answer = tokens(generate(cached, history, **stopping(end, expected, cold)))
        assert answer == tokens(expected)[: len(answer)]
        # Whatever was launched before the end was noticed has been fed; the token sampled last never is.
        fed = len(history) + max(0, len(answer) - 1)
        history = [*history, *answer, 3 + turn, 9]
        following = generate(cached, history)
        assert tokens(following) == tokens(generate(cold, history))
        assert fed <= following.num_cached_tokens <= fed + 1


def stopping(end: str, expected: RequestOutput, llm: LLM) -> dict[str, object]:
    """Settings that end the expected generation at about its sixth token."""
    if end == "length":
        return {"max_tokens": 6}
    if end == "stop token":
        return {"stop_token_ids": [tokens(expected)[5]]}
    assert llm.tokenizer is not None
    return {"stop": [expected.outputs[0].text[8:12]]}


def test_what_is_fed_after_the_end_is_filed_under_it(folder: Path) -> None:
    """With overlap a step more was launched: the stop token was fed, and is reused with the rest."""
    with LLM(str(folder), enable_overlap=True) as llm:
        answer = tokens(generate(llm, PROMPT, stop_token_ids=[tokens(generate(llm, PROMPT))[5]]))
        assert generate(llm, [*PROMPT, *answer, 1, 2]).num_cached_tokens == len(PROMPT) + len(answer)
        assert_idle(llm)
