"""The list of planted bugs keeps up with the code."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def is_whole(mutant: Mutant) -> bool:
    """Whether the code to replace occurs exactly once, and the tests that should notice exist."""
    tests = [test.partition("::") for test in mutant.tests]
    return source(mutant.path).count(mutant.old) == 1 and all(
        (ROOT / file).exists() and (not name or f"def {name.split('[')[0]}(" in source(file)) for file, _, name in tests
    )


def test_every_mutant_changes_one_place() -> None:
    """One test for all: pytest takes as long for a test as this takes for a mutant."""
    assert [mutant.name for mutant in MUTANTS if not is_whole(mutant)] == []


def test_a_mutant_of_other_code_is_found() -> None:
    mutant = MUTANTS[0]
    assert is_whole(mutant)
    assert not is_whole(replace(mutant, old="not there"))
    assert not is_whole(replace(mutant, tests=("tests/test_gone.py",)))
    assert not is_whole(replace(mutant, tests=(f"{__file__}::test_gone",)))
