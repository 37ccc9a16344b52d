"""Random traffic against transformers, with images too, and with every option against a plain engine: a few engines of
it (in CI one with options); ``make fuzz-engine``, ``make fuzz-images`` and ``make fuzz-options`` run more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import fuzz_images, fuzz_options
from tests.fuzz_engine import Episode, run_for
from tests.fuzz_references import ARCHITECTURES, Reference
from tests.whole import takes_long


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: Reference(arch, tmp_path_factory.mktemp(arch)) for arch in dict.fromkeys(ARCHITECTURES)}


@takes_long  # CI runs make fuzz-engine
@pytest.mark.parametrize("seed", [1001, 1002, 1003, 1005])
def test_random_traffic(seed: int, references: dict[str, Reference]) -> None:
    Episode(seed, references).run()


def test_random_options(tmp_path: Path) -> None:
    episode = fuzz_options.Episode(35, {"windows": fuzz_options.references(tmp_path)["windows"]}, always_drafts=True)
    episode.run()
    assert episode.num_accepted


@takes_long  # CI runs make fuzz-images
def test_random_images(tmp_path: Path) -> None:
    """With drafts, preemption, overlap, graphs, and images that come again."""
    episode = fuzz_images.Episode(9, fuzz_images.references(tmp_path, [fuzz_images.VL]), always_drafts=True)
    episode.run()
    assert episode.num_accepted and episode.num_preemptions and episode.num_followed and episode.num_encoder_hits


def test_time_that_ends_before_half_of_the_engines_have_run_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def start(seed: int, references: dict[str, Any]) -> Any:
        return SimpleNamespace(run=lambda: None, figures=lambda: Counter(engines=1))

    def status(*arguments: str) -> int:
        return run_for(30, "nothing", lambda folder: {}, start, list(arguments))

    assert status("--count", "4") == 0 and "time" not in capsys.readouterr().out
    assert status("--count", "2", "--seconds", "0") == 0
    assert "the time ended after 1 of 2 engines" in capsys.readouterr().out
    assert status("--count", "3", "--seconds", "0") == 1
    assert "the time ended after 1 of 3 engines" in capsys.readouterr().out
    assert status("--seconds", "0") == 0 and "time" not in capsys.readouterr().out
