"""The matrix of ``tests/test_x_matrix.py`` with real kernels, graphs and overlap: a part of it that takes two minutes.

Pages and slots that nobody owns are NaN whenever a step starts, and the allocator hands out and takes back memory
between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.test_churn import Churn
from tests.test_x_matrix import PATHS, PHASES, Poisoned, Reference, check, make_reference, open_engine

pytestmark = pytest.mark.gpu

COLUMNS = [
    ("Qwen3NextForCausalLM", "NONE", "capture"),
    ("Qwen3NextForCausalLM", "FULL", "capture"),
    ("Qwen3NextForCausalLM", "FULL_AND_PIECEWISE", "capture"),
    ("Qwen3NextForCausalLM", "PIECEWISE", "inductor"),
    ("Qwen3ForCausalLM", "FULL", "capture"),
]
"""Model, mode, and where pieces come from. In mode PIECEWISE decodes run in pieces too."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: make_reference(arch, tmp_path_factory.mktemp("tiny")) for arch in {column[0] for column in COLUMNS}}


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda p: "-".join(p))
def engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    arch, mode, source = request.param
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    with open_engine(arch, mode, "overlap", source, references, **settings) as engine:
        Churn(engine.llm)
        yield engine


@pytest.mark.parametrize("length", [1, 65, 210, 1000])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_transformers(engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)
