"""Modules load without the collector, and it is back afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import weft
from tests.conftest import count_frozen
from weft.executor import rank
from weft.processes.collector import collector_off, objects_frozen


@pytest.fixture(autouse=True)
def collector_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen when a test begins, and frozen objects are counted."""
    monkeypatch.setattr(gc, "get_freeze_count", count_frozen)
    assert gc.isenabled()
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def test_the_collector_is_off_meanwhile() -> None:
    with collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failing_import_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ImportError), collector_off():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with collector_off():
        pass
    assert not gc.isenabled()


def test_names_that_are_loaded_freeze_nothing() -> None:
    """Objects that exist by then, an engine for example, have to be collected one day."""
    assert weft.LLM.__name__ == "LLM"
    assert weft.LLM.__name__ == "LLM" and gc.get_freeze_count() == 0


def test_frozen_objects_are_collected_again_afterwards() -> None:
    with pytest.raises(ValueError), objects_frozen():
        assert gc.get_freeze_count() > 0
        raise ValueError
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_stays_so() -> None:
    gc.freeze()
    with objects_frozen():
        pass
    assert gc.get_freeze_count() > 0
    with weft.LLM(device="cpu", skip_tokenizer_init=True, cpu_cache_gib=0.05, max_num_seqs=4):
        assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_an_engine_that_has_started_leaves_nothing_frozen() -> None:
    with weft.LLM(device="cpu", skip_tokenizer_init=True, cpu_cache_gib=0.05, max_num_seqs=4):
        assert gc.get_freeze_count() == 0


def test_no_rank_collects_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    on: list[bool] = []
    group = SimpleNamespace(least=lambda value: on.append(gc.isenabled()))
    monkeypatch.setattr(rank, "_ENVIRONMENT", {})
    monkeypatch.setattr(rank, "ProcessGroup", lambda *args: group)
    monkeypatch.setattr(rank, "ModelRunner", lambda config, tp: on.append(gc.isenabled()))
    made: Any = rank.Rank(SimpleNamespace(device="cpu"), 1, 2, None)  # type: ignore[arg-type]
    assert made.group is group and on == [False, False]


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def test_generating_leaves_young_garbage_young_and_the_callers_objects_frozen() -> None:
    """Objects that a freeze makes old are never collected in a program that generates again and again."""
    with weft.LLM(device="cpu", skip_tokenizer_init=True, cpu_cache_gib=0.05, max_num_seqs=4) as llm:
        gc.freeze()
        garbage = weakref.ref(_Cycle())
        llm.generate([[1, 2, 3]], weft.SamplingParams(max_tokens=2))
        assert gc.get_freeze_count() > 0
        gc.collect(1)
        assert garbage() is None
    gc.unfreeze()
