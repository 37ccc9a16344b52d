"""Every option that decides the next token, through the whole engine, against plain references."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from tests.engine import simulator
from tests.engine.conftest import HYBRID, assert_idle
from tests.tiny import make_checkpoint, make_model
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from tests.whole import RUNS_LONG, takes_long, unless_long
from weft.engine.llm import LLM
from weft.sampling_params import SamplingParams

SMALL = {"vocab_size": 23, "initializer_range": 0.2, "eos_token_id": 3}
PROMPT = [5, 11, 2, 19, 7]


def options(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **fields})


def run(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 23 tokens, no tokenizer, and generation defaults with a second end of text."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("small"), **SMALL)
    defaults = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.2, "eos_token_id": [3, 14]}
    (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def small(small_folder: Path) -> Iterator[LLM]:
    with LLM(str(small_folder), skip_tokenizer_init=True, max_num_seqs=128) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture(scope="module")
def small_reference() -> Any:
    return make_model("Qwen3ForCausalLM", **SMALL)


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_model(HYBRID, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)


# -- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        *unless_long(
            [],
            [
                {"temperature": 0.6},
                {"temperature": 1.8, "top_k": 5},
                {"temperature": 1.0, "top_p": 0.6},
                {"temperature": 1.3, "min_p": 0.25},
            ],
        ),
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.15},
    ],
    ids=lambda filters: "-".join(filters),
)
def test_tokens_are_drawn_with_the_probabilities_of_the_filters(
    small: LLM, small_reference: Any, filters: dict[str, Any]
) -> None:
    logits = simulator.next_logits(small_reference, PROMPT)
    want = simulator.filtered(logits, **filters)
    everything = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    params = [SamplingParams(**{**everything, **filters}, n=50, max_tokens=1, seed=seed) for seed in range(40)]
    outputs = small.generate([PROMPT] * len(params), params, use_tqdm=False)
    counts = Counter(c.token_ids[0] for output in outputs for c in output.outputs)
    assert all(want[token] > 0 for token in counts)
    likely = [t for t in range(len(want)) if want[t] * 2000 >= 5]
    observed = [counts[t] for t in likely] + [2000 - sum(counts[t] for t in likely)]
    expected = [2000 * want[t] for t in likely] + [2000 - sum(2000 * want[t] for t in likely)]
    if expected[-1] < 1e-6:
        observed, expected = observed[:-1], expected[:-1]
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_defaults_and_ends_come_from_the_generation_config(small: LLM, small_reference: Any) -> None:
    given = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.2}
    seeds = range(30)
    by_default = small.generate([PROMPT] * 30, [SamplingParams(seed=s, max_tokens=20) for s in seeds], use_tqdm=False)
    named = [SamplingParams(seed=s, max_tokens=20, stop_token_ids=[3, 14], ignore_eos=True, **given) for s in seeds]
    by_name = small.generate([PROMPT] * 30, named, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in by_default] == [o.outputs[0].token_ids for o in by_name]
    ends = {(c.token_ids[-1], c.stop_reason) for o in by_default for c in o.outputs if c.finish_reason == "stop"}
    assert ends == {(3, None), (14, None)}
    assert {c.stop_reason for o in by_name for c in o.outputs if c.finish_reason == "stop"} == {3, 14}
    cold = run(
        small,
        PROMPT,
        SamplingParams(temperature=0, top_k=-1, top_p=1.0, repetition_penalty=1.0, max_tokens=8, ignore_eos=True),
    )
    assert cold[0] == simulator.greedy(small_reference, PROMPT, 8)


def test_a_top_k_beyond_the_vocabulary_keeps_all_whoever_is_in_the_batch(small: LLM) -> None:
    everything = {"temperature": 3.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 12, "ignore_eos": True}
    params = [SamplingParams(seed=s, top_k=k, **everything) for s in range(10) for k in (23, 1000)]
    want = run(small, [PROMPT] * 20, [SamplingParams(seed=s, top_k=0, **everything) for s in range(10) for _ in "ab"])
    mixed = run(small, [PROMPT] * 21, [*params, SamplingParams(seed=1, top_k=2, **everything)])
    assert mixed[:20] == want


# -- the same seed ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens_in_any_company(llm: LLM, cramped: LLM) -> None:
    count, num_tokens = (8, 30) if RUNS_LONG else (6, 20)
    prompts = [list(range(3 + i, 40 + 3 * i)) for i in range(count)]
    params = [
        options(
            temperature=0.9,
            seed=100 + i,
            max_tokens=num_tokens,
            top_p=(1.0, 0.8)[i % 2],
            frequency_penalty=(0.0, 0.5)[i // 4],
        )
        for i in range(count)
    ]
    alone = [run(llm, p, q)[0] for p, q in zip(prompts, params, strict=True)]
    assert run(llm, prompts, params) == alone
    assert run(llm, prompts[::-1], params[::-1]) == alone[::-1]
    before = cramped.stats().num_preemptions
    assert run(cramped, prompts, params) == alone
    assert cramped.stats().num_preemptions > before
    assert len({tuple(output) for output in alone}) == count


def test_samples_of_one_prompt_differ_and_the_first_is_that_of_n_1(llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 7}
    four, two, one = (
        [c.token_ids for c in llm.generate(PROMPT, options(n=n, **params), use_tqdm=False)[0].outputs]
        for n in (4, 2, 1)
    )
    assert len({tuple(c) for c in four}) == 4
    assert four[:2] == two and two[:1] == one


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1, -(2**63)])
def test_any_64_bit_seed(llm: LLM, seed: int) -> None:
    first, second = run(llm, [PROMPT, PROMPT], options(temperature=1.0, seed=seed, max_tokens=6))
    assert first == second
    assert first == run(llm, PROMPT, options(temperature=1.0, seed=seed % 2**64, max_tokens=6))[0]


def test_every_bit_of_the_seed_counts(llm: LLM) -> None:
    params = [options(temperature=1.0, seed=1 + bit, max_tokens=6) for bit in (0, 2**20, 2**31, 2**32, 2**62, 2**63)]
    assert len({tuple(tokens) for tokens in run(llm, [PROMPT] * 6, params)}) == 6


def test_without_a_seed_the_engine_s_seed_decides(folder: Path) -> None:
    params = options(temperature=1.0, max_tokens=8)

    def twice(seed: int) -> list[list[int]]:
        with LLM(str(folder), seed=seed) as engine:
            return run(engine, [PROMPT, PROMPT], params)

    first = twice(1)
    assert first == twice(1)
    assert first[0] != first[1]
    assert first != twice(2)


# -- edits of the logits ---------------------------------------------------------------------------------------------

LETTERS = [67, 68, 69, 70, 71, 72]  # a to f
EDITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.8}, {"repetition": 1.8}),
    "presence": ({"presence_penalty": 1.1}, {"presence": 1.1}),
    "frequency": ({"frequency_penalty": 0.6, "logit_bias": {70: 3.0}}, {"frequency": 0.6, "bias": {70: 3.0}}),
    "negative": ({"frequency_penalty": -1.0, "presence_penalty": -0.5}, {"frequency": -1.0, "presence": -0.5}),
    "bias": ({"logit_bias": {70: 2.5, 71: 2.4, 72: -100.0}}, {"bias": {70: 2.5, 71: 2.4, 72: -100.0}}),
    "allowed": ({"allowed_token_ids": [90, 4, 255, 17]}, {"allowed": [90, 4, 255, 17]}),
    "several": (
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.2,
            "logit_bias": {9: 2.0},
            "allowed_token_ids": list(range(3, 60)),
        },
        {"repetition": 1.3, "frequency": 0.2, "bias": {9: 2.0}, "allowed": list(range(3, 60))},
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_the_logits_equal_a_plain_computation(llm: LLM, reference: Any, name: str) -> None:
    params, plain = EDITS[name]
    prompt = [5, 9, 261, 9, 248]  # continued without edits, a token comes twice
    want = simulator.greedy(reference, prompt, 20, **plain)
    assert want != simulator.greedy(reference, prompt, 20)
    assert run(llm, prompt, options(max_tokens=20, **params)) == [want]


def test_edits_keep_to_their_row(llm: LLM, reference: Any) -> None:
    edits = [({}, {}), *EDITS.values(), ({}, {})]
    prompts = [[(7 * i + row) % VOCAB_SIZE for i in range(30)] for row in range(len(edits))]
    count = 16 if RUNS_LONG else 8
    want = [simulator.greedy(reference, p, count, **plain) for p, (_, plain) in zip(prompts, edits, strict=True)]
    assert run(llm, prompts, [options(max_tokens=count, **fields) for fields, _ in edits]) == want


@takes_long
def test_histories_survive_preemption(llm: LLM, cramped: LLM) -> None:
    """A request that was thrown out goes on with the counts and recent tokens that it had."""
    edits = [fields for fields, _ in EDITS.values()] + [{"bad_words": ["ab", "fd", "c"], "allowed_token_ids": LETTERS}]
    edits *= 2 if RUNS_LONG else 1
    prompts = [[(7 * i + row) % VOCAB_SIZE for i in range(30)] for row in range(len(edits))]
    params = [options(max_tokens=48, **fields) for fields in edits]
    want = run(llm, prompts, params)
    outputs = cramped.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == want
    assert sum(o.metrics.num_preemptions > 0 for o in outputs) >= 4


def test_bad_words_of_one_and_of_several_tokens(llm: LLM, cramped: LLM, reference: Any) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    prompt, letters = [40, 41, 42], [tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    edits: dict[str, Any] = {"allowed": letters, "frequency": 0.4}
    free = simulator.greedy(reference, prompt, 24, **edits)
    letter = tokenizer.decode(free[4:5])
    without = simulator.greedy(reference, prompt, 24, bad=[tokenizer.encode(letter)], **edits)
    pairs = ((without[i : i + 2], tokenizer.decode(without[i : i + 2])) for i in range(8, 23))
    words = [letter, next(text for ids, text in pairs if tokenizer.encode(text) == ids)]
    forms = [tokenizer.encode(form) for word in words for form in (word, f" {word.strip()}")]
    want = simulator.greedy(reference, prompt, 24, bad=forms, **edits)
    assert want not in (free, without)
    params = options(allowed_token_ids=letters, frequency_penalty=0.4)
    filtered = options(allowed_token_ids=letters, frequency_penalty=0.4, bad_words=words)
    assert run(llm, [prompt, prompt], [filtered, params]) == [want, free]
    longer = simulator.greedy(reference, prompt * 20, 24, bad=forms, **edits)
    assert run(cramped, [prompt * 20] * 4, filtered) == [longer] * 4


def test_min_tokens_keeps_every_end_away(llm: LLM, reference: Any) -> None:
    prompt = [40, 41, 42]
    free = simulator.greedy(reference, prompt, 20)
    ends = [free[2], free[5]]
    for min_tokens in (0, 2, 3, 5, 12):
        want = simulator.greedy(reference, prompt, 20, ends=ends, min_tokens=min_tokens)
        params = options(max_tokens=20, stop_token_ids=ends, min_tokens=min_tokens)
        assert run(llm, prompt, params) == [want]
        assert len(want) >= min_tokens


def test_max_tokens_and_the_end_of_the_context(folder: Path) -> None:
    with LLM(str(folder), max_model_len=40) as engine:
        outputs = engine.generate([[5] * 30, [5] * 39], options(max_tokens=None), use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [10, 1]
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
        assert len(run(engine, [5] * 30, options(max_tokens=1))[0]) == 1


def test_eos_ends_a_generation_unless_ignored(llm: LLM) -> None:
    forced = {"logit_bias": {EOS_ID: 100.0}, "max_tokens": 5}
    stopped, ignored, later = llm.generate(
        [PROMPT] * 3,
        [options(ignore_eos=False, **forced), options(**forced), options(ignore_eos=False, min_tokens=3, **forced)],
        use_tqdm=False,
    )
    first = stopped.outputs[0]
    assert (first.token_ids, first.text, first.finish_reason, first.stop_reason) == ([EOS_ID], "", "stop", None)
    assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == ([EOS_ID] * 5, "length")
    assert EOS_ID not in later.outputs[0].token_ids[:3] and later.outputs[0].token_ids[3:] == [EOS_ID]


def test_nothing_is_kept_of_what_ended_requests_asked_for(folder: Path) -> None:
    """A row that asks for nothing costs nothing, and one that nobody has least of all."""
    asked = SamplingParams(frequency_penalty=1.0, bad_words=["a"], logprobs=1, prompt_logprobs=1, max_tokens=2)
    with LLM(str(folder), max_num_seqs=4) as engine:
        engine.generate([[5, 6], [7, 8]], asked, use_tqdm=False)
        engine.generate([[9]], SamplingParams(max_tokens=2), use_tqdm=False)
        steps = engine._core._executor._runner.steps  # type: ignore[attr-defined]
        inputs = steps.sampler.state
        assert not (inputs._counts or inputs._bad_words or inputs._editing or inputs._num_logprobs)
        assert not steps.rows.prompt_logprobs


def test_every_option_at_once(llm: LLM, cramped: LLM) -> None:
    params = SamplingParams(
        n=2,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={65: 1.5},
        allowed_token_ids=list(range(3, 300)),
        bad_words=["fox", "the dog"],
        seed=11,
        stop=["zzz", "qq"],
        stop_token_ids=[299],
        include_stop_str_in_output=True,
        max_tokens=30,
        min_tokens=4,
        ignore_eos=True,
        skip_special_tokens=False,
        detokenize=True,
        logprobs=3,
        prompt_logprobs=2,
    )
    beside = options(max_tokens=30)
    first, plain = llm.generate(["the quick brown fox", "hello"], [params, beside], use_tqdm=False)
    again = cramped.generate(["hello", "the quick brown fox", "one two"], [beside, params, beside], use_tqdm=False)
    assert [c.token_ids for c in again[1].outputs] == [c.token_ids for c in first.outputs]
    assert [c.text for c in again[1].outputs] == [c.text for c in first.outputs]
    assert again[0].outputs[0].token_ids == plain.outputs[0].token_ids
    for completion in first.outputs:
        assert 4 <= len(completion.token_ids) <= 30 and set(completion.token_ids) <= set(range(3, 300))
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
        )
        assert math.isfinite(completion.cumulative_logprob)
