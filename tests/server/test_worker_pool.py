"""Worker processes: what they return, their limits, and whose turn it is."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import stretched
from tests.server.running import is_alive
from weft.errors import ContextLengthError, RequestError
from weft.server.errors import ApiError
from weft.server.worker_pool import Result, WorkerKind, WorkerPool

LIMIT_S = 1.0


def setup(word: str) -> str:
    return word


def broken_setup() -> None:
    raise RequestError("no tokenizer", "model")


def echo(state: str, *given: Any) -> Result:
    return (state, given, os.getpid()), b"x" * 3_000_000


def spin(state: str) -> Result:
    while True:
        pass


def fill(state: str) -> Result:
    return len([bytes(1 << 20) for _ in range(1 << 12)]), b""


def leave(state: str) -> Result:
    os._exit(3)


def note(state: str, name: str, path: str, seconds: float) -> Result:
    with Path(path).open("a") as file:
        file.write(f"{name}\n")
    time.sleep(seconds)
    return name, b""


def refuse(state: str, error: Exception) -> Result:
    raise error


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(WorkerKind("texts", setup, ("state",), 1 << 30, LIMIT_S, 10))
    yield made
    made.close()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(body(), stretched(60))

    return asyncio.run(main())


def test_a_task_gets_what_was_set_up_and_returns_a_value_and_bytes(pool: WorkerPool) -> None:
    async def body() -> None:
        (state, given, pid), blob = await pool.run(echo, 5, "x" * 5_000_000)
        assert (state, given[0], len(given[1]), len(blob)) == ("state", 5, 5_000_000, 3_000_000)
        assert pid != os.getpid()

    run(body)


@pytest.mark.parametrize(
    "error",
    [RequestError("m", "p"), ContextLengthError("m", "p"), ApiError(404, "m", param="p", code="c", retry_after_s=2)],
)
def test_errors_arrive_as_they_were_raised(pool: WorkerPool, error: Exception) -> None:
    async def body() -> None:
        with pytest.raises(type(error)) as raised:
            await pool.run(refuse, error)
        assert type(raised.value) is type(error) and str(raised.value) == "m" and vars(raised.value) == vars(error)
        with pytest.raises(RuntimeError, match="KeyError: 'x'"):
            await pool.run(refuse, KeyError("x"))
        assert (await pool.run(echo))[0][0] == "state"

    run(body)


@pytest.mark.parametrize(("task", "reason"), [(spin, "longer than 1 s"), (fill, "memory"), (leave, "memory")])
def test_a_task_beyond_a_limit_ends_and_the_next_one_runs(
    pool: WorkerPool, task: Callable[..., Result], reason: str
) -> None:
    async def body() -> None:
        with pytest.raises(RequestError, match=reason) as raised:
            await pool.run(task, param="prompt")
        assert raised.value.param == "prompt"
        assert (await pool.run(echo))[0][0] == "state"

    run(body)


def test_a_process_that_cannot_be_set_up_is_an_error() -> None:
    pool = WorkerPool(WorkerKind("texts", broken_setup, (), 1 << 30, LIMIT_S, 10))

    async def body() -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match="no tokenizer"):
                await pool.run(echo)

    run(body)
    pool.close()


def test_a_task_whose_caller_has_gone_is_ended(pool: WorkerPool) -> None:
    async def body() -> None:
        gone = [asyncio.create_task(pool.run(spin)) for _ in range(3)]
        await asyncio.sleep(0.5)
        for each in gone:
            each.cancel()
        began = time.monotonic()
        assert (await pool.run(echo))[0][0] == "state"
        assert time.monotonic() - began < stretched(5)
        assert not pool._waiting

    run(body)


def test_small_tasks_pass_large_ones_and_callers_take_turns(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "order"

    async def body() -> None:
        pool.start()
        await pool.run(echo)
        tasks = [pool.run(note, f"large {i}", str(path), 0.3, caller="a", size=11) for i in range(3)]
        tasks += [pool.run(note, f"small {i}", str(path), 0.3, caller="a", size=1) for i in range(3)]
        tasks += [pool.run(note, "other", str(path), 0.3, caller="b", size=10)]
        running = [asyncio.ensure_future(task) for task in tasks]
        await asyncio.gather(*running)

    run(body)
    order = path.read_text().split("\n")
    assert order.index("other") <= 2, order
    assert order.index("small 0") < order.index("large 1"), order


def test_processes_end_with_the_pool() -> None:
    pool = WorkerPool(WorkerKind("texts", setup, ("state",), 1 << 30, LIMIT_S, 10))

    async def body() -> int:
        return int((await pool.run(echo))[0][2])

    pid = run(body)
    pool.close()
    for _ in range(200):
        if not is_alive(pid) and not any(thread.name.startswith("texts") for thread in threading.enumerate()):
            return
        time.sleep(0.05)
    raise AssertionError("a process or a thread is left")
