"""Ranks for tests, started in tenths of a second: forks of one process that has loaded torch.

Job: ``fork_ranks`` makes ``MultiProcessExecutor`` fork its ranks from a server instead of starting new interpreters.
Does not know: what a rank does; it runs the same ``main``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from subprocess import TimeoutExpired
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["weft.executor.rank", "weft.executor.worker"])


class ForkedRank:
    """The part of ``subprocess.Popen`` that ``Child`` uses for a rank."""

    poisoned = False

    def __init__(self, command: Sequence[str], *, pass_fds: tuple[int, ...], **pipes: Any) -> None:
        (input_read, input_write), (error_read, error_write) = os.pipe(), os.pipe()
        self.stdin, self.stderr = os.fdopen(input_write, "wb"), os.fdopen(error_read, "rb")
        (report,) = pass_fds
        self._process = CONTEXT.Process(
            target=_run, args=(_Descriptors(input_read, error_write, report), report, self.poisoned)
        )
        self._process.start()
        os.close(input_read)
        os.close(error_write)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Descriptors:
    """Standard input, standard error and the report pipe, duplicated for the new process."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _opened, tuple(DupFd(number) for number in self._numbers)


def _opened(*duplicates: Any) -> list[int]:
    return [duplicate.detach() for duplicate in duplicates]


def _run(descriptors: list[int], report: int, poisoned: bool) -> None:
    from weft.executor import worker

    if poisoned:
        _poison_padding()
    for source, target in zip(descriptors, (0, 2, report), strict=True):
        if source != target:
            os.dup2(source, target)
            os.close(source)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin = open(0)  # noqa: SIM115 - for the life of the process
    status = worker.main()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def fork_ranks(*, poisoned: bool = False) -> Iterator[None]:
    """In the body, ranks are forks. ``poisoned``: their page and slot of padding are NaN whenever a step starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.processes.child.Popen", ForkedRank)
        patch.setattr(ForkedRank, "poisoned", poisoned)
        yield


def _poison_padding() -> None:
    import torch

    from weft.runner.model_runner import ModelRunner

    launch = ModelRunner.launch

    @torch.inference_mode()
    def poisoned(runner: ModelRunner, *args: Any) -> Any:
        for cache in runner.caches.values():
            for tensor in cache.values():
                tensor[0] = float("nan")
        return launch(runner, *args)

    ModelRunner.launch = poisoned  # type: ignore[method-assign, assignment]
