"""The x-matrix of the other kinds of layers.

These columns cross every path and phase of the whole matrix (``test_x_matrix.py``), with lengths around one chunk and a
length of two steps. ``make test`` runs a branch of 130 tokens, and of ``VARIANTS`` a preemption too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.whole import covering, unless_long
from tests.x_matrix import BUDGET, PATHS, PHASES, WHOLE, Poisoned, Reference, check, make_reference, open_engine, part

COLUMNS = [("Lfm2ForCausalLM", mode) for mode in unless_long(["FULL"], ["NONE", "FULL_AND_PIECEWISE", "FULL"])]
COLUMNS += [("BambaForCausalLM", "FULL_AND_PIECEWISE"), ("GptOssForCausalLM", "FULL_AND_PIECEWISE")]
COLUMNS += [(f"{name}ForCausalLM", "FULL") for name in ("MiniMax", "RecurrentGemma")]
COLUMNS += [("ZayaForCausalLM", "FULL_AND_PIECEWISE")]
IN_CI = tuple(COLUMNS)
"""One family of each kind of states that ``tests/engine/test_prefix_cache.py`` does not have. CI reuses states of the
others in ``tests/models/test_parity.py``."""
COLUMNS += [("Inkling2ForCausalLM", "FULL_AND_PIECEWISE")]
COLUMNS += [(f"{name}ForCausalLM", "FULL") for name in ("KimiLinear", "Jamba", "Mamba2", "Qwen4Exp", "Zamba")]
COLUMNS += [("Glm5NextForConditionalGeneration", "FULL")]
COLUMNS += [(f"{name}ForCausalLM", "FULL_AND_PIECEWISE") for name in ("Zamba2", "Inkling")]
VARIANTS = [(f"{name}ForCausalLM", "FULL") for name in ("BailingHybrid", "Lfm3", "Mamba")]
"""Families whose layers differ little from the others'."""
RUN, RUN_IN_PART = unless_long(IN_CI, COLUMNS), unless_long([], VARIANTS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    names = {arch for arch, _ in (*RUN, *RUN_IN_PART)}
    return {arch: make_reference(arch, tmp_path_factory.mktemp("tiny")) for arch in names}


@pytest.fixture(scope="module", params=[*RUN, *(VARIANTS if WHOLE else [])], ids=lambda p: "-".join(p))
def engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    arch, mode = request.param
    with open_engine(arch, mode, "overlap", "capture", references) as engine:
        yield engine


CELLS = covering(PATHS, PHASES, part(1, 65, BUDGET + 18), of=1)


@pytest.mark.parametrize(("path", "phase", "length"), unless_long([("branch hit", "decode", 130)], CELLS))
def test_tokens_are_those_of_transformers(engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)


@pytest.fixture(scope="module", params=RUN_IN_PART, ids=lambda p: "-".join(p))
def variant(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    with open_engine(*request.param, "overlap", "capture", references) as engine:
        yield engine


@pytest.mark.skipif(WHOLE, reason="the whole matrix has these cells")
@pytest.mark.parametrize(
    ("path", "phase"), [("branch hit", "mixed"), ("preempted", "decode"), *unless_long([], [("hit", "decode")])]
)
def test_tokens_of_variants(variant: Poisoned, path: str, phase: str) -> None:
    check(variant, path, phase, BUDGET + 18)
