"""The definition of a planted bug."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug.

    Attributes:
        name: short and unique.
        promise: what it breaks.
        path: file, from the root of the project.
        old, new: text that occurs once in the file, and its replacement.
        tests: what pytest is given.
    """

    name: str
    promise: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutant(name: str, promise: str, path: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, promise, path, old, new, tests)
