"""The executor of several ranks, without processes: the settings that ranks start with, and the end."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from weft.config import resolve
from weft.errors import ConfigError, EngineDeadError
from weft.executor import multi_process
from weft.executor.multi_process import MultiProcessExecutor
from weft.executor.worker import WorkerStart, decode_start, encode_start
from weft.messages import SchedulerOutput


class Step:
    """A step in flight that is done when ``done`` says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done

    @property
    def is_done(self) -> bool:
        return self._done()


class Ranks:
    """A stand-in for ring, rank 0, the other ranks and their folder, which logs the calls in order."""

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
    assert threads[0] == 3, "all ranks share the processors, as many threads each"
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


def test_a_step_beside_a_dead_rank_is_not_waited_for() -> None:
    looks = iter([False] * 100)
    executor, ranks = make([], Step(lambda: next(looks)))
    ranks.check = lambda: (_ for _ in ()).throw(EngineDeadError("rank 1 has ended"))  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="rank 1 has ended"):
        executor.result()


def test_a_step_that_breaks_on_rank_0_is_the_end_of_all() -> None:
    """The others run it, and would wait for rank 0 in a collective."""
    log: list[str] = []
    executor, ranks = make(log)
    failed: list[Any] = []

    def launch(step: SchedulerOutput) -> None:
        raise RuntimeError("out of memory")

    executor._rank = SimpleNamespace(runner=SimpleNamespace(launch=launch))  # type: ignore[assignment]
    ranks.fail = lambda message, wait_s: failed.append((message, wait_s))
    executor.launch(SchedulerOutput(1, []))
    assert log == ["send"] and not executor._pending
    assert failed == [("a step broke on rank 0: RuntimeError: out of memory", multi_process._EXPLAIN_S)]


@pytest.mark.parametrize("where", ["_gather", "Rank"])
def test_a_start_that_fails_leaves_nothing_open(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the memory and the pipes of the ring nor a thread, and torch has its threads again."""

    def refuse(*_: Any) -> Any:
        raise ConfigError("no")

    log: list[str] = []
    rank = Ranks(log)
    rank.is_loaded, rank.rank, rank.ending = True, 1, lambda: None
    threads: list[int] = []
    monkeypatch.setattr(MultiProcessExecutor, "_gather", lambda *_: ([rank], "store"))
    monkeypatch.setattr(*((MultiProcessExecutor, where) if where == "_gather" else (multi_process, where)), refuse)
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    gc.collect()  # what earlier tests left is not closed in the middle of this one
    config, before = resolve(device="cpu", tensor_parallel_size=2), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="no"):
        MultiProcessExecutor(config)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "rank watch"]
    assert threads == [3, 7] and log == (["kill"] if where == "Rank" else [])
