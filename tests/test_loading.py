"""Modules load without the collector, and it is back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import weft
from weft.loading import loading_modules


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_is_off_meanwhile_and_leaves_out_what_was_loaded() -> None:
    gc.unfreeze()
    with loading_modules():
        assert not gc.isenabled() and gc.get_freeze_count() == 0
        made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert gc.isenabled() and gc.get_freeze_count() > len(made)


def test_a_failing_import_leaves_the_collector_as_it_was() -> None:
    gc.unfreeze()
    with pytest.raises(ImportError), loading_modules():
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    with loading_modules():
        pass
    assert not gc.isenabled()


def test_names_that_are_loaded_freeze_nothing() -> None:
    """What lives by then, an engine for example, has to be collected one day."""
    assert weft.LLM.__name__ == "LLM"
    gc.unfreeze()
    assert weft.LLM.__name__ == "LLM" and gc.get_freeze_count() == 0
