"""Worker processes: results, limits, and the order of tasks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.patience import stretched
from tests.server.running import is_alive
from tests.server.task_worker import Do
from weft.errors import ContextLengthError, RequestError
from weft.server.worker_pool import WorkerKind, WorkerPool

LIMIT_S = 1.0


def kind_of(setup: bytes) -> WorkerKind:
    return WorkerKind("texts", "tests.server.task_worker", setup, 1 << 30, LIMIT_S, 10)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(kind_of(b"state"))
    yield made
    made.close()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(body(), stretched(60))

    return asyncio.run(main())


async def echo(pool: WorkerPool, content: bytes = b"") -> list[Any]:
    value, blob = await pool.run(Do("echo"), content)
    assert blob == b"x" * 3_000_000
    return msgspec.msgpack.decode(value)


def test_a_task_gets_what_was_set_up_and_returns_a_value_and_bytes(pool: WorkerPool) -> None:
    async def body() -> None:
        state, size, pid = await echo(pool, b"x" * 5_000_000)
        assert (state, size) == ("state", 5_000_000) and pid != os.getpid()

    run(body)


def test_errors_arrive_as_they_were_raised(pool: WorkerPool) -> None:
    async def body() -> None:
        for what, kind in (("refuse", RequestError), ("too long", ContextLengthError)):
            with pytest.raises(RequestError) as raised:
                await pool.run(Do(what))
            assert (type(raised.value), str(raised.value), raised.value.param) == (kind, "m", "p")
        with pytest.raises(RuntimeError, match="KeyError: 'x'"):
            await pool.run(Do("break"))
        assert (await echo(pool))[0] == "state"

    run(body)


@pytest.mark.parametrize(("what", "reason"), [("spin", "longer than 1 s"), ("fill", "memory"), ("leave", "memory")])
def test_a_task_beyond_a_limit_ends_and_the_next_one_runs(pool: WorkerPool, what: str, reason: str) -> None:
    async def body() -> None:
        with pytest.raises(RequestError, match=reason) as raised:
            await pool.run(Do(what), param="prompt")
        assert raised.value.param == "prompt"
        assert (await echo(pool))[0] == "state"

    run(body)


def test_a_process_that_cannot_be_set_up_is_an_error() -> None:
    pool = WorkerPool(kind_of(b"broken"))

    async def body() -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match="no tokenizer"):
                await echo(pool)

    run(body)
    pool.close()


def test_a_task_whose_caller_has_gone_is_ended(pool: WorkerPool) -> None:
    async def body() -> None:
        gone = [asyncio.create_task(pool.run(Do("spin"))) for _ in range(3)]
        await asyncio.sleep(0.5)
        for each in gone:
            each.cancel()
        began = time.monotonic()
        assert (await echo(pool))[0] == "state"
        assert time.monotonic() - began < stretched(5)
        assert not pool._waiting

    run(body)


def test_small_tasks_pass_large_ones_and_callers_take_turns(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "order"

    async def body() -> None:
        pool.start()
        while pool._num_idle < 2:  # or one process takes all before the other is ready
            await asyncio.sleep(0.01)
        tasks = [pool.run(Do(f"large {i}", str(path), 0.3), caller="a", size=11) for i in range(3)]
        tasks += [pool.run(Do(f"small {i}", str(path), 0.3), caller="a", size=1) for i in range(3)]
        tasks += [pool.run(Do("other", str(path), 0.3), caller="b", size=10)]
        await asyncio.gather(*tasks)

    run(body)
    order = path.read_text().split("\n")
    assert order.index("other") <= 2, order
    assert order.index("small 0") < order.index("large 1"), order


def test_processes_end_with_the_pool() -> None:
    pool = WorkerPool(kind_of(b"state"))
    pid = run(lambda: echo(pool))[2]
    pool.close()
    for _ in range(200):
        if not is_alive(pid) and not any(thread.name.startswith("texts") for thread in threading.enumerate()):
            return
        time.sleep(0.05)
    raise AssertionError("a process or a thread is left")
