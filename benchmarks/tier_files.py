"""Measure the files of the disk tier on the CPU: writing, and reading from the page cache and from the disk.

    python -m benchmarks.tier_files --folder DIR --json FILE

Pages have the size of Qwen3-Next's with 12 layers (98,304 bytes). A prefix of 30,000 tokens has 1,875 of them. Orders
are queued as a step queues them, and results are taken as a step takes them. ``queue_ms`` is the time that a step needs
to queue all orders. ``beside_turns_per_s`` is the speed of a Python loop meanwhile, ``alone_turns_per_s`` its speed
without orders.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft.bench import report
from weft.messages import FileOrder
from weft.parallel.tensor_parallel import SingleRank
from weft.runner.file_results import FileResults
from weft.runner.host_files import HostFiles

PAGE_BYTES = 98_304


def names(count: int) -> list[str]:
    return [f"{(7919 * index) % 2**32:08x}{index:024x}.page" for index in range(count)]


def orders(kind: str, count: int) -> list[FileOrder]:
    return [FileOrder(index, kind, name, index, False) for index, name in enumerate(names(count))]


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for path in folder.glob("*/*/*.page"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_from_disk() -> int:
    """Bytes that this process has read from devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def turns_per_s(until: Callable[[], bool]) -> float:
    """Turns of a Python loop per second until ``until`` holds, which is asked each millisecond."""
    began = asked = time.perf_counter()
    count = 0
    while True:
        count += 1
        now = time.perf_counter()
        if now - asked >= 1e-3:
            asked = now
            if until():
                return count / (now - began)


class Run:
    """Orders that are queued, and how many of them have ended."""

    def __init__(self, files: HostFiles, orders: list[FileOrder]) -> None:
        self._files, self._left = files, len(orders)
        self.begun = time.perf_counter()
        files.begin(orders, [])
        self.queue_ms = 1e3 * (time.perf_counter() - self.begun)

    def is_done(self) -> bool:
        for _, _, reason in self._files.results.take():
            assert not reason, reason
            self._left -= 1
        return not self._left

    def wait(self) -> None:
        """Wait as a step without requests does."""
        while not self.is_done():
            self._files.results.wait()


def run(files: HostFiles, given: list[FileOrder], before: Callable[[], None]) -> dict[str, float]:
    """Run orders twice: the caller waits for their ends, or computes meanwhile. ``before`` is called before each."""
    before()
    read, alone = read_from_disk(), Run(files, given)
    alone.wait()
    seconds = time.perf_counter() - alone.begun
    figures = {
        "gb_s": len(given) * PAGE_BYTES / seconds / 1e9,
        "us_per_file": 1e6 * seconds / len(given),
        "queue_ms": alone.queue_ms,
        "from_disk_gb": (read_from_disk() - read) / 1e9,
    }
    before()
    beside = Run(files, given)
    turns = turns_per_s(beside.is_done)
    seconds = time.perf_counter() - beside.begun
    return figures | {"beside_turns_per_s": turns, "beside_gb_s": len(given) * PAGE_BYTES / seconds / 1e9}


def half_a_second() -> Callable[[], bool]:
    end = time.perf_counter() + 0.5
    return lambda: time.perf_counter() > end


def measure(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    pages = torch.randint(256, (count, PAGE_BYTES), dtype=torch.uint8)
    content, states = pages.clone(), torch.empty(0, PAGE_BYTES, dtype=torch.uint8)
    files = HostFiles(folder, "f", pages, states, FileResults(SingleRank()))
    figures: dict[str, Any] = {"alone_turns_per_s": turns_per_s(half_a_second())}
    forget_all = partial(forget, folder)
    try:
        figures["write"] = run(files, orders("save", count), lambda: None)
        for name in ("page cache", "disk"):
            rows = []
            for _ in range(repeats):
                pages.zero_()
                rows.append(run(files, orders("load", count), forget_all if name == "disk" else lambda: None))
                assert torch.equal(pages, content), "a page has other bytes than were written"
            figures[name] = {key: median(row[key] for row in rows) for key in rows[0]}
    finally:
        files.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder on the disk to measure")
    parser.add_argument("--count", type=int, default=1875)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    path = report.open_json(args.json)
    try:
        figures = measure(args.folder, args.count, args.repeats)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    result = report.provenance("cpu") | {"benchmark": "tier_files", "pages": args.count, "page_bytes": PAGE_BYTES}
    report.write_json(path, result | figures)
    for name, values in figures.items():
        print(name, values)


if __name__ == "__main__":
    main()
