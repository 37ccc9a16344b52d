"""Cached or not, a request gives the same tokens: real tiny models, float32, against an engine without the cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.engine.conftest import assert_idle
from tests.whole import unless_long
from weft import LLM, SamplingParams
from weft.cache.policy import LRU, FlopAware
from weft.outputs import RequestOutput

ARCHITECTURES = [
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Lfm2ForCausalLM",
    "OlmoHybridForCausalLM",
    "KimiLinearForCausalLM",
]
OTHER_KINDS = [
    "Mamba2ForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM", "GptOssForCausalLM", "Zamba2ForCausalLM",
    "ZayaForCausalLM",
    "InklingForCausalLM", "Inkling2ForCausalLM",
]  # fmt: skip
"""Architectures with layers that the list above lacks, for the worked example alone."""
PROMPT = [(7 * i + i // 5) % 200 for i in range(210)]


def greedy(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run(llm: LLM, *prompts: list[int], max_tokens: int = 4) -> list[RequestOutput]:
    return llm.generate(list(prompts), greedy(max_tokens), use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engines(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[tuple[LLM, LLM]]:
    folder = str(folder_of(request.param))
    with LLM(folder, max_num_seqs=4) as cached, LLM(folder, max_num_seqs=4, enable_prefix_caching=False) as cold:
        yield cached, cold


@pytest.fixture
def pair(engines: tuple[LLM, LLM]) -> Iterator[tuple[LLM, LLM]]:
    """An engine with the cache, which is empty, and one without."""
    assert engines[0].reset_prefix_cache()
    yield engines
    assert_idle(engines[0])


@pytest.mark.parametrize("engines", [*ARCHITECTURES, *unless_long(OTHER_KINDS[1::3], OTHER_KINDS)], indirect=True)
def test_worked_example(pair: tuple[LLM, LLM]) -> None:
    """210 tokens, then the same and 20 more: all but what must be computed is reused, and outputs equal a cold run."""
    cached, cold = pair
    longer, other = PROMPT + [3] * 20, PROMPT + [4] * 20
    results = [run(cached, p)[0] for p in (PROMPT, longer, other, PROMPT)]
    assert tokens(results) == tokens(run(cold, PROMPT, longer, other, PROMPT))
    # A hybrid model keeps the state at the prompt's end less one, and at 210 once a request has left it there.
    second = 209 if cached.config.model_config.is_hybrid else 210
    assert [o.num_cached_tokens for o in results] == [0, second, 210, 209]
    report = results[1].cache_report
    assert report is not None and (report.num_kv_tokens, report.num_reused_tokens) == (210, second)


@pytest.mark.parametrize("length", unless_long([1, 65], [1, 2, 63, 64, 65, 130, 210]))
def test_identical_and_continued_prompts(pair: tuple[LLM, LLM], length: int) -> None:
    cached, cold = pair
    prompt = PROMPT[:length]
    first, again = run(cached, prompt)[0], run(cached, prompt)[0]
    assert again.num_cached_tokens == length - 1
    history = prompt + list(first.outputs[0].token_ids)
    longer = run(cached, [*history, 9])[0]
    assert longer.num_cached_tokens == len(history) - 1  # the last token sampled was never fed
    assert tokens([first, again, longer]) == tokens(run(cold, prompt, prompt, [*history, 9]))


BRANCHING = [
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3ForCausalLM",
    "Lfm2ForCausalLM",
    "OlmoHybridForCausalLM",
    "BambaForCausalLM",
    "Mamba2ForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "MiniMaxForCausalLM",
]
SEEDS = dict.fromkeys(
    ("BambaForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM"), "Lfm2ForCausalLM"
)
"""Seeds of architectures whose own name leads to a workload in which some policy finds nothing to reuse."""


OTHER_POLICIES = [
    *product(["Qwen3NextForCausalLM", "Lfm2ForCausalLM"], ["aligned", "finish_only"]),
    ("Mamba2ForCausalLM", "aligned"),
    ("JambaForCausalLM", "finish_only"),
]


@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        *((arch, "exact") for arch in unless_long(["Qwen3NextForCausalLM", "Qwen3ForCausalLM"], BRANCHING)),
        *unless_long(OTHER_POLICIES[3:4], OTHER_POLICIES),
    ],
)
def test_random_branching_workload(arch: str, policy: str, folder_of: Callable[[str], Path]) -> None:
    """Branching prompts, several at a time, in chunks, on pools so small that states and KV are always evicted."""
    rng = random.Random(SEEDS.get(arch, arch) + policy)
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "page_size": 4, "num_kv_pages": 110}
    if arch != "Qwen3ForCausalLM":
        settings["num_state_slots"] = 12
    folder = str(folder_of(arch))
    corpus = [[1, 2, 3]]
    with (
        LLM(folder, state_checkpoint_policy=policy, **settings) as cached,
        LLM(  # type: ignore[arg-type]
            folder, max_num_seqs=8, enable_prefix_caching=False
        ) as cold,
    ):
        for _ in range(6):
            prompts = []
            for _ in range(5):
                base = rng.choice(corpus)
                new = [rng.randrange(200) for _ in range(rng.choice([1, 2, 17, 64, 70]))]
                prompts.append((base[: rng.randint(0, len(base))] + new)[-200:])
            results = run(cached, *prompts, max_tokens=6)
            assert tokens(results) == tokens(run(cold, *prompts, max_tokens=6))
            corpus += [o.prompt_token_ids + list(o.outputs[0].token_ids) for o in results]
        stats = cached._core.manager.stats()
        assert stats.num_hit_tokens and stats.num_evicted_pages
        assert_idle(cached)


def test_samples_of_one_prompt_share_its_prefill(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=4) as llm:
        params = SamplingParams(n=4, temperature=1.0, max_tokens=4, ignore_eos=True, seed=1)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        assert len(output.outputs) == 4
        assert llm._core.manager.stats().num_hit_tokens == 3 * 209


def test_prompt_logprobs_skip_the_cache(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        first, again = (llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2))
        assert again.num_cached_tokens == 0 and again.prompt_logprobs == first.prompt_logprobs


@pytest.mark.parametrize(("name", "policy"), [("flops", FlopAware), ("lru", LRU)])
def test_the_eviction_policy_is_the_one_that_was_chosen(name: str, policy: type, folder: Path) -> None:
    with LLM(str(folder), eviction_policy=name) as llm:
        assert isinstance(llm._core.manager.evictor.policy, policy)


def test_eviction_is_tuned_behind_a_launch(cramped: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every request that has ended, but no token waits for it."""
    core, order = cramped._core, list[str]()
    monkeypatch.setattr(core, "_tuner", lambda ended: order.append(f"tune {ended.num_prompt_tokens}"))
    for room in ("launch", "result"):
        method = getattr(core._executor, room)
        monkeypatch.setattr(core._executor, room, lambda *a, m=method, r=room: order.append(r) or m(*a))
    run(cramped, [7] * 9, max_tokens=1)
    assert order == ["launch", "result"]
    run(cramped, [8] * 5, max_tokens=1)
    assert order == ["launch", "result", "launch", "tune 9", "result"]


def test_eviction_is_tuned_by_one_request_a_step(cramped: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next first token does not wait for all requests that ended together."""
    core, tuned = cramped._core, list[int]()
    monkeypatch.setattr(core, "_tuner", lambda ended: tuned.append(ended.num_prompt_tokens))
    run(cramped, *([token] * token for token in (7, 8, 9)), max_tokens=1)
    tuned.clear()
    left = len(core._ended)
    assert left > 1
    run(cramped, [5] * 4, max_tokens=1)
    assert len(tuned) == 1 and len(core._ended) == left
