"""A server for other people's clients: over the fake engine, which repeats what was said last, or over the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer

MODEL = "weft-mini"


@pytest.fixture(scope="package")
def server() -> Iterator[RunningServer]:
    yield from _serve("tests.server.fake_server")


@pytest.fixture(scope="package")
def mini() -> Iterator[RunningServer]:
    """The bundled model behind ``weft serve``."""
    yield from _serve("weft", "--cpu-cache-gib", "0.1", "--max-num-seqs", "16")


def _serve(module: str, *flags: str) -> Iterator[RunningServer]:
    running = RunningServer(*flags, module=module)
    try:
        yield running.wait_ready()
    finally:
        running.close()
