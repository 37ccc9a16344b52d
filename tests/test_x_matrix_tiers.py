"""The combinations of ``test_x_matrix.py`` for prefixes that come back from host memory, in every kind of layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import x_matrix as matrix

MODES = [("NONE", "overlap"), ("FULL", "in turn")]
if matrix.WHOLE:
    MODES = [(mode, overlap) for mode in matrix.MODES for overlap in matrix.OVERLAP]
COLUMNS: list[tuple[str, str, str, dict[str, Any]]] = [
    (arch, *mode, {}) for arch in (*matrix.ARCHITECTURES, matrix.WITH_HEAD) for mode in MODES
]
COLUMNS += [(matrix.HYBRID, "NONE", "overlap", {"tensor_parallel_size": 2})]
COLUMNS += [(matrix.HYBRID, "NONE", "overlap", {"kv_offloading_policy": "write_through_selective"})]
KINDS = ["Lfm2", "Bamba", "GptOss", "KimiLinear", "Mamba2", "Jamba", "MiniMax", "BailingHybrid"]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, matrix.Reference]:
    archs = {arch for arch, *_ in COLUMNS} | {f"{kind}ForCausalLM" for kind in KINDS}
    return {arch: matrix.make_reference(arch, tmp_path_factory.mktemp("reference")) for arch in archs}


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda column: "-".join(map(str, column)))
def engine(request: pytest.FixtureRequest, references: dict[str, matrix.Reference]) -> Iterator[matrix.Poisoned]:
    arch, mode, overlap, more = request.param
    settings: dict[str, Any] = {"kv_offloading_size": 0.05} | more
    if arch == matrix.WITH_HEAD:
        settings["speculative_config"] = matrix.drafts_of(arch)
    with matrix.open_engine(arch, mode, overlap, "capture", references, **settings) as engine:
        yield engine


@pytest.mark.parametrize(
    ("phase", "length"), [(phase, length) for phase in matrix.PHASES for length in matrix.part(65, 210)]
)
def test_tokens_are_those_of_the_reference(engine: matrix.Poisoned, phase: str, length: int) -> None:
    if engine.llm.config.kv_offloading_policy == "write_through_selective":
        check_selective(engine, phase, length)
    elif engine.llm.config.speculative_config is None:
        matrix.check(engine, "restored", phase, length)
    else:  # drafts decide which sequences share a step
        matrix.check_drafts(engine, "restored", length)
    stats = engine.llm.stats()
    assert stats.num_restores and stats.num_external_hit_tokens


def check_selective(engine: matrix.Poisoned, phase: str, length: int) -> None:
    """A prefix that was reused once comes back."""
    prompt, salt = engine.prompt_of(length), engine.begin()
    for _ in range(2):
        engine.run(prompt, 6, salt)
    engine.evict_all()
    engine.steps.clear()
    request, _ = matrix.RUNS[phase](engine, prompt, salt)
    engine.reference.check(prompt, request.output_token_ids)
    assert request.num_cached_tokens == length - 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_comes_back(kind: str, references: dict[str, matrix.Reference]) -> None:
    arch = f"{kind}ForCausalLM"
    with matrix.open_engine(arch, "NONE", "overlap", "capture", references, kv_offloading_size=0.2) as engine:
        matrix.check(engine, "restored", "mixed", 129)
        assert engine.llm.stats().num_external_hit_tokens
