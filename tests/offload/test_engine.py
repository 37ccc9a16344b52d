"""Whole engines with a tier in host memory: what users see of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from tests.whole import unless_long
from weft import LLM, SamplingParams
from weft.cache.match import Match
from weft.config import resolve
from weft.errors import ConfigError
from weft.offload.build import SLICE_PAGES
from weft.runner.host_link import DirectLink

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[(i * i + seed) % 300 + 5 for i in range(150)] for seed in range(4)]
TINY: dict[str, Any] = {
    "device": "cpu",
    "num_kv_pages": 24,
    "num_state_slots": 5,
    "max_num_seqs": 2,
    "max_model_len": 256,
}


def serve(llm: LLM, index: int) -> tuple[list[int], str, int]:
    output = llm.generate({"prompt_token_ids": PROMPTS[index]}, PARAMS, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids), str(output.cache_report), output.num_cached_tokens


def test_a_returning_prompt_says_what_was_restored() -> None:
    with LLM(**TINY, kv_offloading_size=0.1) as llm:
        first = [serve(llm, index) for index in range(4)]
        again = [serve(llm, index) for index in range(4)]
        stats = llm.stats()
        restores = llm._core.scheduler.restores
        assert restores is not None and restores._slice_pages == SLICE_PAGES, "these pages are small"
        assert llm.reset_prefix_cache()
        after_reset = serve(llm, 0)
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first]
    assert all(num_cached == 149 for *_, num_cached in again), again
    assert again[0][1].startswith("KV and state of 149 tokens restored from host memory in ")
    assert stats.num_external_hit_tokens == 4 * 149 and stats.num_restores == 4
    assert stats.restored_bytes and stats.stored_bytes >= stats.restored_bytes
    assert after_reset[2] == 0 and after_reset[0] == first[0][0]


def test_pages_of_a_broken_step_are_free_when_its_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**TINY, kv_offloading_size=0.1) as llm:
        first = [serve(llm, index)[0] for index in range(4)]
        restores, steps = llm._core.scheduler.restores, llm._core._executor._runner.steps  # type: ignore[attr-defined]
        assert restores is not None
        order, broke = list[str](), restores.broke
        monkeypatch.setattr("weft.executor.in_process.wait_for_steps", lambda: order.append("copies ended"))
        monkeypatch.setattr(restores, "broke", lambda step: (order.append("pages free"), broke(step)))
        with monkeypatch.context() as patched, pytest.raises(OSError, match="no step today"):
            patched.setattr(steps, "prepare", lambda step: (_ for _ in ()).throw(OSError("no step today")))
            serve(llm, 0)
        assert order == ["copies ended", "pages free"]
        assert [serve(llm, index)[0] for index in range(4)] == first
        restores.check()


def test_requests_that_wait_for_a_restore_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**TINY, kv_offloading_size=0.1) as llm:
        for index in range(4):
            serve(llm, index)
        manager, restores = llm._core.manager, llm._core.scheduler.restores
        assert restores is not None
        lookups, match = [], manager.match
        restores._slice_pages = 1

        def look_up(*args: Any, **more: Any) -> Match:
            lookups.append(args)
            return match(*args, **more)

        monkeypatch.setattr(manager, "match", look_up)
        for index in range(2):
            llm.add_request({"prompt_token_ids": PROMPTS[index]}, PARAMS)
        counts = []
        while not llm.is_finished():
            llm.step()
            if restores.is_active:
                counts.append(len(lookups))
    assert counts.count(2) > 1, "both requests waited for several steps, and were looked up at their begin"
    assert restores.tier.counts.num_restores == 2


COPY = DirectLink.to_device


def slow(*args: Any) -> Tensor:
    time.sleep(0.4)
    return COPY(*args)


def test_a_request_that_did_not_fit_is_looked_up_when_there_is_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**TINY, kv_offloading_size=0.1) as llm:
        manager, restores = llm._core.manager, llm._core.scheduler.restores
        assert restores is not None
        lookups, look_up = [], restores.tier.look_up

        def counted(*args: Any) -> Any:
            lookups.append(len(args[0]))
            return look_up(*args)

        monkeypatch.setattr(restores.tier, "look_up", counted)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for index in range(2):  # each needs more than half of the pages
            llm.add_request({"prompt_token_ids": [*PROMPTS[index], *PROMPTS[index][:40]]}, params)
        finished = [
            output.request_id for _ in range(1000) if not llm.is_finished() for output in llm.step() if output.finished
        ]
        assert len(finished) == 2 and manager.pages.capacity < 2 * 12
    assert len(lookups) < 12, "the second request waited for some sixty steps"


@pytest.mark.parametrize("is_slow", unless_long([True], [False, True]))
def test_a_slow_link_is_measured_and_not_used(monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    """The first restore measures the link. Later decisions depend on that measurement alone."""
    if is_slow:
        monkeypatch.setattr(DirectLink, "to_device", slow)
    with LLM(**TINY, kv_offloading_size=0.1) as llm:
        first = [serve(llm, index)[0] for index in range(4)]
        again = [serve(llm, index) for _ in range(2) for index in range(4)]
        stats = llm.stats()
    assert [tokens for tokens, *_ in again] == first * 2
    if is_slow:
        assert (stats.num_restores, stats.num_refused_restores) == (1, 7)
        assert "but restoring would take" in again[-1][1]
    else:
        assert stats.num_restores > 2


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size=1e-06 is too small: .* need at least"):
        LLM(**TINY, kv_offloading_size=1e-6)


def test_a_tier_needs_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size=1\.0 has no effect with enable_prefix_caching=False"):
        resolve(device="cpu", kv_offloading_size=1, enable_prefix_caching=False)
