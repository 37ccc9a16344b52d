"""``tests/fuzz_deterministic.py`` on a GPU: 400 requests of random traffic to each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz_deterministic import KINDS, References, episode

pytestmark = pytest.mark.gpu
FAR = 1e12
"""A time that does not come."""


@pytest.fixture(scope="module", params=[pytest.param(k, marks=pytest.mark.xdist_group(k)) for k in KINDS["cuda"]])
def references(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[References]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    found = References(request.param, "cuda", folder)
    yield found
    found.alone.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(references: References, seed: int) -> None:
    found = episode(seed, references, "cuda", FAR)
    assert found["requests"] > 250 and found["tokens"] > 2500, dict(found)
