"""Whether every test runs (``make test-all``, the GPU tier), or the part that ``make test`` chooses."""

import os
from collections.abc import Iterable
from itertools import combinations, product
from math import comb
from typing import Any

import pytest
import torch

WHOLE = bool(os.environ.get("WEFT_WHOLE_MATRIX"))
"""Whether every case runs. If not, each matrix names the part to run."""

_LONG = WHOLE or bool(os.environ.get("WEFT_LONG_TESTS"))

RUNS_LONG = _LONG or torch.cuda.is_available()
"""Whether every case runs, also where a matrix runs in part: on a GPU, and for planted bugs (``make mutate``)."""

takes_long = pytest.mark.skipif(not _LONG, reason="takes long; runs in make test-all")
"""For a test of a second or more, whose subject has quicker tests too."""

takes_long_on_cpu = pytest.mark.skipif(not RUNS_LONG, reason="takes long; runs in make test-all and on a GPU")
"""The same for a test that the GPU tier runs too."""


def covering(*axes: Iterable[Any], of: int = 2) -> list[tuple[Any, ...]]:
    """The product of ``axes``. Where long tests do not run, a part in which the values of any ``of`` axes meet in every
    combination: all pairs of values, or with 1 all values."""
    cells = list(product(*axes))
    if RUNS_LONG:
        return cells
    covered: set[Any] = set()
    chosen: set[int] = set()
    for least in range(comb(len(axes), of), 0, -1):
        for number, cell in enumerate(cells):
            new = set(combinations(enumerate(map(repr, cell)), of)) - covered
            if len(new) >= least:
                chosen.add(number)
                covered |= new
    return [cells[number] for number in sorted(chosen)]


def unless_long(quick: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Values of a parameter: ``every``, or ``quick`` where long tests do not run."""
    return list(every if RUNS_LONG else quick)
