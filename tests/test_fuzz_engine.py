"""Random traffic against transformers, a few engines of it; ``make fuzz-engine`` runs more."""

from __future__ import annotations

import pytest

from tests.fuzz_engine import ARCHITECTURES, Episode, Reference


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: Reference(arch, tmp_path_factory.mktemp(arch)) for arch in dict.fromkeys(ARCHITECTURES)}


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_random_traffic(seed: int, references: dict[str, Reference]) -> None:
    Episode(seed, references).run()
