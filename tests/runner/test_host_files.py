"""Threads for files of the disk tier: every order that somebody waits for ends with a result."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.messages import FileOrder
from weft.offload import disk
from weft.parallel.tensor_parallel import SingleRank
from weft.runner.file_results import FileResults, Result
from weft.runner.host_files import HostFiles

NAME = f"{1:032x}.page"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HostFiles]:
    pages, states = torch.arange(64, dtype=torch.uint8).view(4, 16), torch.zeros(2, 16, dtype=torch.uint8)
    files = HostFiles(tmp_path, "f", pages, states, FileResults(SingleRank()))
    yield files
    files.close()


def ends(files: HostFiles, count: int) -> list[Result]:
    """The results of ``count`` orders, or those that came within two seconds."""
    found: list[Result] = []
    deadline = time.monotonic() + 2
    while len(found) < count and time.monotonic() < deadline:
        files.results.wait()
        found += files.results.take()
    return found


def test_a_file_that_cannot_be_removed_keeps_nobody_waiting(files: HostFiles, tmp_path: Path) -> None:
    """Orders of one task follow each other, and a removal may fail: here a folder has the file's name."""
    disk.path_of(tmp_path, "f", NAME).mkdir(parents=True)
    files.begin([FileOrder(1, "drop", NAME, 0), FileOrder(2, "save", f"{2:032x}.page", 3)], [])
    assert ends(files, 1) == [(2, 16, "")]


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
        results.wait()
        assert results.take() == [(7, 16, "")]
        results.close()
    finally:
        for file in spare:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
