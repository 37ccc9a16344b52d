"""The executor of several ranks: what it starts them with, and its end, without processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from weft.config import resolve
from weft.errors import EngineDeadError
from weft.executor import multi_process
from weft.executor.multi_process import MultiProcessExecutor
from weft.executor.worker import WorkerStart, decode_start, encode_start


class Step:
    """A step in flight that is done when ``done`` says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done

    @property
    def is_done(self) -> bool:
        return self._done()


class Ranks:
    """In the place of ring, rank 0, the other ranks and their folder: what is asked of them, in order."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.error: EngineDeadError | None = None

    def failure(self) -> EngineDeadError | None:
        return self.error

    def check(self) -> None:
        """Nobody is missed."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._log.append(name)


def make(log: list[str], *steps: Step) -> tuple[MultiProcessExecutor, Ranks]:
    executor, ranks = MultiProcessExecutor.__new__(MultiProcessExecutor), Ranks(log)
    executor._pending, executor._profiler, executor._num_threads = deque(steps), None, 1  # type: ignore[arg-type]
    for name in ("_workers", "_ring", "_rank", "_folder"):
        setattr(executor, name, ranks)
    return executor, ranks


@pytest.mark.parametrize(("verbose", "log_json"), [(True, False), (False, True)])
def test_ranks_are_started_as_this_process_was(verbose: bool, log_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(executor: MultiProcessExecutor, start: WorkerStart, started: Any) -> Any:
        raise Started(start, started, executor._ring.address)

    threads: list[int] = []
    monkeypatch.setattr(MultiProcessExecutor, "_gather", start)
    monkeypatch.setattr(multi_process, "_is_verbose", lambda: verbose)
    monkeypatch.setattr(multi_process, "logs_json", lambda: log_json)
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    config = resolve(device="cpu", tensor_parallel_size=2)
    with pytest.raises(Started) as got:
        MultiProcessExecutor(config, ["ranks"])  # type: ignore[list-item]
    given, started, address = got.value.args
    assert given == WorkerStart(2, config, address, 3, 0.0, verbose, log_json) and started == ["ranks"]
    assert threads == [3], "all ranks share the processors, as many threads each"
    assert decode_start(encode_start((given, 1, "store", 5))) == (given, 1, "store", 5)


def test_the_end_waits_for_the_steps_in_flight() -> None:
    log: list[str] = []

    def second_look() -> bool:
        log.append("look")
        return log.count("look") == 2

    executor, _ = make(log, Step(lambda: False), Step(second_look))
    executor.stop()
    assert log == ["look", "look", "send", "may_leave", "close", "wait", "cleanup", "close"]
    assert not executor._pending


def test_the_end_does_not_wait_beside_a_dead_rank() -> None:
    log: list[str] = []
    looks = iter([False])
    executor, ranks = make(log, Step(lambda: next(looks)))
    ranks.error = EngineDeadError("rank 1 has ended")
    executor.stop()
    assert log == ["close", "wait", "cleanup", "close"]


def test_the_end_waits_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(multi_process, "_FINISH_S", 0.01)
    log: list[str] = []
    looks = iter([False] * 5000)
    executor, _ = make(log, Step(lambda: next(looks)))
    with caplog.at_level(logging.WARNING):
        executor.stop()
    assert log[0] == "send" and "not done" in caplog.text
