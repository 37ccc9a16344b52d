"""Random traffic against transformers, and with every option against a plain engine: a few engines of it; ``make
fuzz-engine`` and ``make fuzz-options`` run more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz_options
from tests.fuzz_engine import Episode
from tests.fuzz_references import ARCHITECTURES, Reference


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: Reference(arch, tmp_path_factory.mktemp(arch)) for arch in dict.fromkeys(ARCHITECTURES)}


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_random_traffic(seed: int, references: dict[str, Reference]) -> None:
    Episode(seed, references).run()


def test_random_options(tmp_path: Path) -> None:
    episode = fuzz_options.Episode(35, {"windows": fuzz_options.references(tmp_path)["windows"]}, always_drafts=True)
    episode.run()
    assert episode.num_accepted
