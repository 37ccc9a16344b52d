"""The x-matrix of the other kinds of layers: every path and phase that the whole matrix (``test_x_matrix.py``) crosses,
at the lengths around one chunk and at one that takes two steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.x_matrix import BUDGET, PATHS, PHASES, Poisoned, Reference, check, make_reference, open_engine, part

COLUMNS = [("Lfm2ForCausalLM", mode) for mode in ("NONE", "FULL_AND_PIECEWISE", "FULL")]
COLUMNS += [("BambaForCausalLM", "FULL_AND_PIECEWISE"), ("GptOssForCausalLM", "FULL_AND_PIECEWISE")]
COLUMNS += [(f"{name}ForCausalLM", "FULL") for name in ("KimiLinear", "Mamba2", "Jamba", "MiniMax")]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: make_reference(arch, tmp_path_factory.mktemp("tiny")) for arch in {arch for arch, _ in COLUMNS}}


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda p: "-".join(p))
def engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    arch, mode = request.param
    with open_engine(arch, mode, "overlap", "capture", references) as engine:
        yield engine


@pytest.mark.parametrize("length", part(1, 65, BUDGET + 18))
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_transformers(engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)
