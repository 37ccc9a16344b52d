"""Faults at the server with the bundled model, at a small part of the recorded counts; see ``faults.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server import faults
from tests.server.running import RunningServer
from tests.whole import takes_long


@pytest.fixture(scope="module")
def mini() -> Iterator[RunningServer]:
    with faults.serving("--num-kv-pages", "110", "--num-state-slots", "40", "--restart-engine") as server:
        yield server


@takes_long
def test_callers_that_leave_at_every_stage(mini: RunningServer) -> None:
    faults.aborts(mini, 100)


@takes_long
def test_an_engine_that_stands_still_goes_on_afterwards(mini: RunningServer) -> None:
    faults.stopped_engine(mini)


@takes_long
def test_memory_is_flat(mini: RunningServer, server: RunningServer) -> None:
    """The engine's and its server's; and of many more requests to a server whose engine costs nothing."""
    faults.steady_memory(server, 1200, is_model=False)
    faults.steady_memory(mini, 300)


@takes_long  # tests/server/test_api_servers.py: a fake engine
def test_a_killed_engine_is_replaced(mini: RunningServer) -> None:
    faults.killed_engine(mini, 1)


@takes_long
def test_five_times_too_many() -> None:
    faults.overload(150)


@takes_long
def test_a_nan_fails_its_request_alone() -> None:
    faults.not_a_number(1)
