"""The matrix of ``tests/test_x_matrix.py`` with real kernels, graphs and overlap: a part of it that takes two minutes.

Pages and slots that nobody owns are NaN whenever a step starts, and the allocator hands out and takes back memory
between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.gpu.test_churn import Churn
from tests.x_matrix import (
    PATHS,
    PHASES,
    WITH_HEAD,
    Poisoned,
    Reference,
    check,
    check_drafts,
    drafts_of,
    install_drafter,
    make_reference,
    open_engine,
    part,
)

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
    names = {WITH_HEAD, *(column[0] for column in COLUMNS)}
    return {name: make_reference(name, tmp_path_factory.mktemp("tiny")) for name in names}


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda p: "-".join(p))
def engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    arch, mode, source = request.param
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    with open_engine(arch, mode, "overlap", source, references, **settings) as engine:
        Churn(engine.llm)
        yield engine


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("arch", ["Qwen3NextForCausalLM", WITH_HEAD])
def test_tokens_with_drafts(references: dict[str, Reference], arch: str, mode: str) -> None:
    """Right and wrong drafts are verified, together with prefill chunks. Nothing is compiled, and nothing rejected is
    read. Steps with drafts of the head follow one another without waiting for results."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "speculative_config": drafts_of(arch)}
    overlap = "overlap" if arch == WITH_HEAD else "in turn"
    with open_engine(arch, mode, overlap, "capture", references, **settings) as engine:
        Churn(engine.llm)
        install_drafter(engine, arch)
        for path, length in product(["cold", "hit", "branch hit"], [1, 65, 210]):
            check_drafts(engine, path, length)
        assert engine.llm.stats().spec_decode_num_accepted_tokens > engine.num_cases


@pytest.mark.parametrize("length", part(1, 65, 210, 1000))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_transformers(engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)
