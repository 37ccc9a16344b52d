"""Tiny checkpoints and engines that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from weft.engine.llm import LLM

HYBRID = "Qwen3NextForCausalLM"


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Architecture -> folder of a tiny checkpoint with a tokenizer, made once."""
    folders: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in folders:
            folders[arch] = make_checkpoint(arch, tmp_path_factory.mktemp(arch), with_tokenizer=True)
        return folders[arch]

    return get


@pytest.fixture(scope="session")
def folder(folder_of: Callable[[str], Path]) -> Path:
    """A tiny hybrid checkpoint with a tokenizer."""
    return folder_of(HYBRID)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """A roomy engine over it: nothing is chunked or preempted."""
    with LLM(str(folder), max_num_seqs=32) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture(scope="module")
def cramped(folder: Path) -> Iterator[LLM]:
    """A cramped engine over it: 3 requests at a time, chunks of at most 48 tokens, pages for about 150 tokens."""
    with LLM(str(folder), max_num_seqs=3, max_num_batched_tokens=48, page_size=4, num_kv_pages=40) as engine:
        yield engine
        assert_idle(engine)


def assert_idle(engine: LLM) -> None:
    """No request is open and every page and slot is free, or the cache's to give away."""
    assert engine.is_finished()
    stats, plan, cache = engine.stats(), engine._core.plan, engine._core.manager.stats()
    engine._core.scheduler.check()
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    assert cache.num_free_pages + cache.num_evictable_pages == plan.num_pages - 1
    assert cache.num_free_slots + cache.num_evictable_slots == plan.num_slots - 1
