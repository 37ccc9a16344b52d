"""Layers with sliding windows in whole engines: memory that does not grow, prefixes reused where windows are whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.engine.simulator import log_probs
from tests.tiny import make_checkpoint, make_model
from tests.whole import covering, unless_long
from weft import LLM, SamplingParams
from weft.cache.spec import CacheSpec
from weft.config import resolve
from weft.config.layer_spec import CacheDtypes

MIXED: tuple[str, dict[str, Any]] = (
    "Qwen3ForCausalLM",
    {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 20},
)
ONLY_WINDOWS: tuple[str, dict[str, Any]] = ("MistralForCausalLM", {"sliding_window": 33})
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def make(model: tuple[str, dict[str, Any]], folder: Path) -> tuple[str, Any]:
    """The checkpoint's folder, and the model of transformers."""
    arch, overrides = model
    return str(make_checkpoint(arch, folder, with_tokenizer=True, **overrides)), overrides


def test_windows_are_planned_as_states(tmp_path: Path) -> None:
    folder, _ = make(MIXED, tmp_path)
    spec = CacheSpec.from_model(resolve(model=folder, device="cpu").model_config, page_size=16, dtypes=CacheDtypes())
    assert spec.slot_bytes == 2 * 20 * 2 * 16 * 4  # keys and values of 20 tokens, two heads of 16
    assert spec.kv_bytes_per_token == 2 * 2 * 16 * 4  # of the other layer


@pytest.mark.parametrize(
    ("model", "mode"), covering([MIXED, ONLY_WINDOWS], ["NONE", "FULL", "FULL_AND_PIECEWISE"], of=1)
)
def test_greedy_tokens_of_the_reference(model: tuple[str, dict[str, Any]], mode: str, tmp_path: Path) -> None:
    """Cold and continued prompts, in prefills cut at odd places and decodes that turn the window over."""
    arch, overrides = model
    folder = str(make_checkpoint(arch, tmp_path, **overrides))
    reference = make_model(arch, **overrides)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_batched_tokens": 48, "cuda_graph_mode": mode}
    prompts = [list(range(n)) for n in (5, 33, 130)]
    with LLM(folder, device="cpu", max_num_seqs=4, **settings) as llm:
        for suffix, hits in (([], [0, 0, 0]), ([3], [4, 32, 129])):
            asked = [prompt + suffix for prompt in prompts]
            outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
            for prompt, output in zip(asked, outputs, strict=True):
                got = list(output.outputs[0].token_ids)
                best = log_probs(reference, prompt + got).argmax(-1).tolist()
                assert len(got) == 40 and got == best[len(prompt) - 1 : -1]
            assert all(o.num_cached_tokens >= hit for o, hit in zip(outputs, hits, strict=True))
        assert_idle(llm)


@pytest.mark.parametrize("policy", unless_long(["exact"], ["exact", "aligned", "finish_only"]))
def test_branching_workload_equals_a_cold_run(policy: str, tmp_path: Path) -> None:
    """On pools so small that windows and KV are always evicted."""
    rng = random.Random(policy)
    folder, _ = make(MIXED, tmp_path)
    small: dict[str, Any] = {"max_num_batched_tokens": 48, "page_size": 4, "num_kv_pages": 110, "num_state_slots": 12}
    corpus = [[1, 2, 3]]
    with (
        LLM(folder, device="cpu", max_num_seqs=3, state_checkpoint_policy=policy, **small) as cached,
        LLM(folder, device="cpu", max_num_seqs=8, enable_prefix_caching=False) as cold,
    ):
        for _ in range(5):
            prompts = []
            for _ in range(5):
                base = rng.choice(corpus)
                new = [rng.randrange(200) for _ in range(rng.choice([1, 2, 17, 64, 70]))]
                cut = rng.choice([len(base), rng.randint(0, len(base))])
                prompts.append((base[:cut] + new)[:200])
            results, wanted = (llm.generate(prompts, PARAMS, use_tqdm=False) for llm in (cached, cold))
            assert [o.outputs[0].token_ids for o in results] == [o.outputs[0].token_ids for o in wanted]
            corpus += [o.prompt_token_ids + list(o.outputs[0].token_ids) for o in results]
        stats = cached._core.manager.stats()
        assert stats.num_hit_tokens and stats.num_evicted_pages
        assert_idle(cached)
