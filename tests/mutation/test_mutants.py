"""The list of planted bugs keeps up with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_changes_one_place(mutant: Mutant) -> None:
    """And the tests that should notice it are there."""
    assert (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.old) == 1
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name.split('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")
        assert (ROOT / file).exists()
