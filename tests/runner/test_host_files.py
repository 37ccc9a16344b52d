"""Threads for files of the disk tier: every order that somebody waits for ends with a result."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patience import stretched
from weft.messages import FileOrder
from weft.offload import disk
from weft.parallel.tensor_parallel import SingleRank
from weft.runner import file_results
from weft.runner.file_results import FileResults, Result
from weft.runner.host_files import BATCH, HostFiles

NAME = f"{1:032x}.page"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HostFiles]:
    pages, states = torch.arange(64, dtype=torch.uint8).view(4, 16), torch.zeros(2, 16, dtype=torch.uint8)
    files = HostFiles(tmp_path, "f", pages, states, FileResults(SingleRank()))
    yield files
    files.close()


def ends(results: FileResults, count: int) -> list[Result]:
    """The results of ``count`` orders, or those that came within some seconds."""
    found: list[Result] = []
    deadline = time.monotonic() + stretched(5)
    while len(found) < count and time.monotonic() < deadline:
        results.wait()
        found += results.take()
    return found


def test_a_file_that_cannot_be_removed_keeps_nobody_waiting(files: HostFiles, tmp_path: Path) -> None:
    """Orders of one task follow each other, and a removal may fail: here a folder has the file's name."""
    disk.path_of(tmp_path, "f", NAME).mkdir(parents=True)
    files.begin([FileOrder(1, "drop", NAME, 0), FileOrder(2, "save", f"{2:032x}.page", 3)], [])
    assert ends(files.results, 1) == [(2, 16, "")]


def test_results_of_a_process_with_many_open_files(tmp_path: Path) -> None:
    """``select.select`` knows no descriptors from 1,024 on, and the process of an ``LLM`` may have as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        results = FileResults(SingleRank())
        results.expect(1)
        results.wait()
        results.put(7, 16, "")
        assert ends(results, 1) == [(7, 16, "")]
        results.close()
    finally:
        for file in spare:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_results_than_the_pipe_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wait for room. A pipe has a page at least, and a read of 50 bytes ends inside a message."""
    monkeypatch.setattr(file_results, "_PIPE_BYTES", 50)
    results, count, reason = FileResults(SingleRank()), 500, "no space " * 10
    results.expect(count)

    def put() -> None:
        for number in range(count):
            results.put(number, 16, reason)

    thread = threading.Thread(target=put)
    thread.start()
    try:
        found = ends(results, count)
    finally:
        results.stop()
        thread.join()
        results.close()
    assert found == [(number, 16, reason) for number in range(count)]


def test_every_order_of_a_step_is_run_after_the_copies_before_it(files: HostFiles) -> None:
    """Also with more orders than a task has."""
    copied = threading.Event()
    copy: Any = SimpleNamespace(synchronize=copied.wait)
    orders = [FileOrder(number, "save", f"{number:032x}.page", number % 4) for number in range(3 * BATCH)]
    files.begin(orders, [copy])
    files.results.wait()
    assert not files.results.take()
    copied.set()
    assert sorted(ends(files.results, len(orders))) == [(order.number, 16, "") for order in orders]
