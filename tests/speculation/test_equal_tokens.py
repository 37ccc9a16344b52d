"""Whatever is drafted, the tokens are those of plain decoding, and so are log probabilities, ends and texts."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.drafters import FromOutputs, Random, install
from tests.engine.conftest import assert_idle
from tests.shared import kept_open
from tests.speculation.conftest import CONFIG, MAX_DRAFTS, Case
from tests.whole import covering, unless_long
from weft import LLM, SamplingParams
from weft.scheduler.draft_planner import DeviceDrafts, Proposer

ARCHITECTURES = ["Qwen3NextForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM"]
"""The last one's windows verify nothing: its drafts run as prefills."""
Engines = tuple[LLM, LLM]


@pytest.fixture(scope="module")
def engines_of(folder_of: Callable[[str], Path]) -> Iterator[Callable[[str], Engines]]:
    with kept_open(lambda arch: open_engines(str(folder_of(arch))), at_most=4) as engines_of:
        yield engines_of


@pytest.fixture(params=unless_long(ARCHITECTURES, [*ARCHITECTURES, "Lfm2ForCausalLM"]))
def engines(request: pytest.FixtureRequest, engines_of: Callable[[str], Engines]) -> Engines:
    return engines_of(request.param)


@contextmanager
def open_engines(folder: str) -> Iterator[Engines]:
    """Without and with drafts; chunks of at most 24 tokens, so that prefills, decodes and drafts share steps."""
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "page_size": 4}
    with LLM(folder, **settings) as plain, LLM(folder, speculative_config=CONFIG, **settings) as drafting:
        yield plain, drafting
        assert_idle(drafting)


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    texts = [[rng.randrange(3, 200) for _ in range(rng.choice([1, 3, 9, 30, 65]))] for _ in range(count)]
    return [text * rng.choice([1, 2]) for text in texts]


DRAFTERS = ["ngram", "right", "wrong", "wrong at 1", "wrong now and then", "random"]


@pytest.mark.parametrize(
    ("engines", "drafter", "num_drafts"),
    [
        *covering(ARCHITECTURES, DRAFTERS, [1, 4], of=1),
        *unless_long([], product(ARCHITECTURES, ["right"], [2])),
        *unless_long([], product(ARCHITECTURES, ["wrong now and then"], [3])),
    ],
    indirect=["engines"],
)
def test_greedy(engines: Engines, drafter: str, num_drafts: int) -> None:
    plain, drafting = engines
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, seed=n) for n in (1, 2, 13, 24, 24, 7)]
    case = Case(prompts(6, seed=num_drafts), params)
    expected = case.run(plain)
    known, rng = case.known(expected), random.Random(num_drafts)
    proposers: dict[str, Proposer] = {
        "ngram": DeviceDrafts(),
        "right": FromOutputs(known),
        "wrong": FromOutputs(known, lambda place, rng: True),
        "wrong at 1": FromOutputs(known, lambda place, rng: place == 1),
        "wrong now and then": FromOutputs(known, lambda place, rng: rng.random() < 0.3, rng),
        "random": Random(rng),
    }
    install(drafting, proposers[drafter], num_drafts)
    if drafter == "right":  # prompts that are cached leave the whole budget to drafts, whichever test ran before
        case.run(drafting)
    before = drafting.stats()
    found = case.run(drafting)
    stats = drafting.stats()
    assert [f.token_ids for f in found] == [e.token_ids for e in expected]
    drafted = stats.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    accepted = stats.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    assert drafted > 0 and (accepted == drafted if drafter == "right" else accepted <= drafted)
    assert accepted == 0 or drafter != "wrong"
    if drafter == "right":  # a step for every K + 1 tokens, but for the first token, which the prefill samples
        assert accepted >= sum(n - 1 - -(-(n - 1) // (num_drafts + 1)) for n in (13, 24, 24, 7))


@pytest.mark.parametrize("mode", unless_long(["PIECEWISE", "FULL"], ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL"]))
def test_drafts_of_steps_whose_graph_samples_alone(mode: str, folder_of: Callable[[str], Path]) -> None:
    """A graph that only samples compares no drafts with its tokens. Steps in pieces have such a graph, and mixtures."""
    folder = str(folder_of("Qwen3ForCausalLM"))
    settings: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "page_size": 4, "num_kv_pages": 600}
    settings["cuda_graph_mode"] = mode
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, seed=n) for n in (13, 24, 24, 7)]
    case = Case(prompts(4, seed=1), params)
    with LLM(folder, max_num_seqs=4) as plain:
        expected = case.run(plain)
    with LLM(folder, speculative_config=CONFIG, **settings) as drafting:
        for is_wrong in (lambda place, rng: False, lambda place, rng: place == 1, lambda place, rng: True):
            install(drafting, FromOutputs(case.known(expected), is_wrong), 3)
            assert [f.token_ids for f in case.run(drafting)] == [e.token_ids for e in expected]
        assert drafting.stats().spec_decode_num_accepted_tokens > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "hot": {"temperature": 1.5},
    "penalties": {"temperature": 0.6, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "bias": {"temperature": 0.7, "logit_bias": {5: 4.0, 9: -5.0}, "allowed_token_ids": list(range(3, 90))},
    "bad words": {"temperature": 0, "bad_words": ["e", "ab", "the", "in"]},
    "min tokens": {"temperature": 1.0, "min_tokens": 9, "ignore_eos": False, "logit_bias": {2: 8.0}},
    "stop ids": {"temperature": 1.0, "stop_token_ids": list(range(3, 40))},
    "stop string": {"temperature": 1.0, "stop": ["a", "e", "o"]},
    "log probabilities": {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1},
}


@pytest.mark.parametrize(("engines", "option"), covering(ARCHITECTURES, OPTIONS, of=1), indirect=["engines"])
def test_options(engines: Engines, option: str) -> None:
    """Every sampling parameter acts at the position where it belongs, with its counts and its random numbers."""
    plain, drafting = engines
    values = {"max_tokens": 20, "ignore_eos": True} | OPTIONS[option]
    case = Case(prompts(4, seed=len(option)), [SamplingParams(**values, seed=s) for s in range(1, 5)])
    expected = case.run(plain)
    endless = [SamplingParams(**(values | {"stop": None, "stop_token_ids": None}), seed=s) for s in range(1, 5)]
    longer = Case(case.prompts, endless)
    may_end = "stop" in option or option == "min tokens"
    known = longer.known(longer.run(plain) if may_end else expected)  # drafts go past the end
    install(drafting, FromOutputs(known, lambda place, rng: rng.random() < 0.15), MAX_DRAFTS)
    before = drafting.stats().spec_decode_num_accepted_tokens
    found = case.run(drafting)
    assert drafting.stats().spec_decode_num_accepted_tokens > before, "nothing was accepted"
    for f, e in zip(found, expected, strict=True):
        assert (f.token_ids, f.text) == (e.token_ids, e.text)
        assert (f.finish_reason, f.stop_reason) == (e.finish_reason, e.stop_reason)
        assert (f.logprobs is None) == (e.logprobs is None)
        for a, b in zip(f.logprobs or [], e.logprobs or [], strict=True):
            assert a.keys() == b.keys() and all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


def test_requests_of_one_step_bring_equally_many_tokens(engines: Engines) -> None:
    """Missing drafts are filled up with any tokens, which are not counted as drafts. Drafts may reach past the end."""
    plain, drafting = engines
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, seed=n) for n in (9, 10, 11)]
    case = Case(prompts(3, seed=2), params)
    expected = case.run(plain)
    known = case.known(expected)
    del known[tuple(case.prompts[0]), 9], known[tuple(case.prompts[1]), 10]
    install(drafting, FromOutputs(known), 3)
    before = drafting.stats().spec_decode_num_draft_tokens
    executor, steps = drafting._core._executor, []
    launch = executor.launch
    executor.launch = lambda step, *more: (steps.append(step), launch(step, *more))[1]  # type: ignore[method-assign]
    try:
        assert [f.token_ids for f in case.run(drafting)] == [e.token_ids for e in expected]
    finally:
        executor.launch = launch  # type: ignore[method-assign]
    counts = [{len(r.draft_token_ids) for r in step.requests} for step in steps]
    assert sum(found == {3} for found in counts) >= 2, counts
    assert drafting.stats().spec_decode_num_draft_tokens - before <= 11


def test_nothing_is_paid_without_drafts(engines: Engines) -> None:
    """A decode step of an engine that does not speculate enters no function of what does
    (``benchmarks/host_calls.py`` counts all)."""
    plain, _ = engines
    for prompt in prompts(3, seed=5):
        plain.add_request({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while any(not r.output_token_ids for r in plain._core.scheduler.requests):
        plain.step()
    entered: Counter[str] = Counter()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        _, is_weft, path = frame.f_code.co_filename.rpartition("/weft/")
        if event == "call" and is_weft:
            entered[path] += 1

    sys.setprofile(notice)
    try:
        for _ in range(5):
            plain._core.step()
    finally:
        sys.setprofile(None)
    while not plain.is_finished():
        plain.step()
    rooms = ("speculation/", "scheduler/draft", "cache/draft", "runner/following", "runner/drafters")
    assert entered["scheduler/scheduler.py"] and not [path for path in entered if path.startswith(rooms)], entered


def test_drafts_take_no_room_from_others(engines: Engines) -> None:
    """Where the budget is short, drafts are what is left out: every running request gets a token in each step."""
    plain, drafting = engines
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=s) for s in range(4)]
    case = Case(prompts(4, seed=9), params)
    expected = case.run(plain)
    install(drafting, FromOutputs(case.known(expected)), MAX_DRAFTS)
    drafting._core.scheduler.max_num_batched_tokens = 6
    try:
        assert [f.token_ids for f in case.run(drafting)] == [e.token_ids for e in expected]
    finally:
        drafting._core.scheduler.max_num_batched_tokens = 24
