"""One server over the fake engine for all tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--max-queue-size", "40", "--max-n", "16")
    try:
        yield running.wait_ready()
    finally:
        running.close()
