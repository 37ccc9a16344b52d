"""Random traffic against transformers, with images too, and with every option against a plain engine: a few engines of
it; ``make fuzz-engine``, ``make fuzz-images`` and ``make fuzz-options`` run more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import fuzz_images, fuzz_options
from tests.fuzz_engine import Episode
from tests.fuzz_references import ARCHITECTURES, Reference


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: Reference(arch, tmp_path_factory.mktemp(arch)) for arch in dict.fromkeys(ARCHITECTURES)}


@pytest.mark.parametrize("seed", [1001, 1002, 1003, 1005])
def test_random_traffic(seed: int, references: dict[str, Reference]) -> None:
    Episode(seed, references).run()


def test_random_options(tmp_path: Path) -> None:
    episode = fuzz_options.Episode(35, {"windows": fuzz_options.references(tmp_path)["windows"]}, always_drafts=True)
    episode.run()
    assert episode.num_accepted


def test_random_images(tmp_path: Path) -> None:
    """With drafts, preemption, overlap, graphs, and images that come again."""
    references, met = fuzz_images.references(tmp_path, [fuzz_images.VL]), Counter[str]()
    names = ("num_accepted", "num_preemptions", "num_followed", "num_encoder_hits")
    for seed in range(11, 16):  # mostly the first has all of it
        episode = fuzz_images.Episode(seed, references, always_drafts=True)
        episode.run()
        met.update({name: getattr(episode, name) for name in names})
        if all(met[name] for name in names):
            return
    raise AssertionError(met)
