"""How long a step's scheduler output takes to reach another rank, through the ring in shared memory.

Usage: ``python -m benchmarks.step_broadcast [--steps 2000] [--json FILE]``. CPU only.

A reader in another process receives decode steps of 1, 32 and 128 requests, and notes when each was decoded. The writer
waits 1 ms between two steps, as long as a short decode step takes. ``encode_us`` and ``send_us`` are rank 0's time.
``arrive_us`` is from before the encoding to after the decoding. All are medians and 99th percentiles. With ``spin_s`` 0
the reader sleeps between steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from weft.bench import report
from weft.executor.ring import Address, Reader, Writer
from weft.executor.worker import STOP, decode_step, encode_step
from weft.messages import ScheduledRequest, SchedulerOutput


def read(address: Address, spin_s: float, queue: Any) -> None:
    """The other rank: the moment at which each step was decoded."""
    reader, moments = Reader(address, 0, spin_s), list[float]()
    queue.put("up")
    while (message := reader.receive()) != STOP:
        decode_step(message)
        moments.append(time.monotonic())
    queue.put(moments)


def measure(num_requests: int, spin_s: float, steps: int) -> dict[str, Any]:
    """Microseconds of one kind of step."""
    requests = [ScheduledRequest(row, 1000 + row, 1, [], row + 1, True) for row in range(num_requests)]
    writer = Writer(1)
    queue: multiprocessing.Queue[Any] = multiprocessing.Queue()
    process = multiprocessing.Process(target=read, args=(writer.address, spin_s, queue))
    process.start()
    queue.get()
    began, encoded, sent = [], [], []
    for step in range(steps):
        began.append(time.monotonic())
        message = encode_step(SchedulerOutput(step, requests))
        encoded.append(time.monotonic())
        writer.send(message, lambda: None)
        sent.append(time.monotonic())
        time.sleep(1e-3)
    writer.send(STOP, lambda: None)
    arrived = queue.get()
    process.join()
    writer.close()
    columns = {"encode": (began, encoded), "send": (encoded, sent), "arrive": (began, arrived)}
    row: dict[str, Any] = {"requests": num_requests, "bytes": len(message), "spin_s": spin_s}
    for name, (start, end) in columns.items():
        times = 1e6 * (np.array(end) - np.array(start))
        row[f"{name}_us"] = round(float(np.median(times)), 1)
        row[f"{name}_p99_us"] = round(float(np.quantile(times, 0.99)), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [measure(n, spin_s, args.steps) for spin_s in (2e-3, 0.0) for n in (1, 32, 128)]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.json:
        found = report.provenance("cpu") | {"load_average": os.getloadavg(), "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
