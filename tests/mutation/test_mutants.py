"""The list of planted bugs keeps up with the code."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_changes_one_place(mutant: Mutant) -> None:
    """And the tests that should notice it are there."""
    assert source(mutant.path).count(mutant.old) == 1
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name.split('[')[0]}(" in source(file)
        assert (ROOT / file).exists()
