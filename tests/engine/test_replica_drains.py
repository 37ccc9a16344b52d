"""A drained replica ends when its own requests have, whatever the others do; and what a replica asks of a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.patience import GUARD_S
from weft.engine import replicas
from weft.engine.ray_cluster import bundle_of
from weft.engine.replicas import ReplicaSet


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_DRAIN_LOOK_S", 0.001)


def end_when_idle(open_requests: dict[str, Any], index: int, process: Any) -> Any:
    return ReplicaSet._end_when_idle(SimpleNamespace(_open=open_requests), index, process)  # type: ignore[arg-type]


def test_requests_of_others_do_not_keep_it() -> None:
    process = AsyncMock()
    others = {"a": SimpleNamespace(index=0), "b": SimpleNamespace(index=2)}
    asyncio.run(asyncio.wait_for(end_when_idle(others, 1, process), GUARD_S))
    process.stop.assert_awaited_once()


def test_its_own_requests_end_first() -> None:
    async def drain() -> None:
        process, entries = AsyncMock(), {"a": SimpleNamespace(index=1)}
        ending = asyncio.create_task(end_when_idle(entries, 1, process))
        await asyncio.sleep(0.05)
        process.stop.assert_not_awaited()
        entries.clear()
        await asyncio.wait_for(ending, GUARD_S)
        process.stop.assert_awaited_once()

    asyncio.run(drain())


def test_a_replica_asks_for_a_gpu_for_each_rank() -> None:
    pytest.importorskip("ray")
    assert bundle_of({"device": "cuda", "tensor_parallel_size": 4}) == {"GPU": 4, "CPU": 4}
    assert bundle_of({"device": "cuda"}) == {"GPU": 1, "CPU": 1}
    assert bundle_of({"device": "cpu", "tensor_parallel_size": 2}) == {"CPU": 2}
