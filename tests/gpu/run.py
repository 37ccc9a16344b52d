"""The GPU tier, groups side by side: ``python -m tests.gpu.run --json FILE`` (four to five minutes).

Job: run each group of test files as a process of its own, spread over the visible devices. When a group ends, write its
results with device, versions, commit and date. A group that does not end in time counts as unfinished.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from weft.bench import report

GROUPS: dict[str, tuple[str, ...]] = {
    "kernels, layers, quantization": ("tests/ops", "tests/layers", "tests/quantization", "-n", "16"),
    "x-matrix": ("tests/gpu/test_x_matrix.py", "-n", "2", "--dist", "loadfile"),
    "parity and precision": ("tests/gpu/test_parity.py", "tests/gpu/test_precision.py", "-n", "3"),
    "engine": ("tests/gpu/test_engine.py", "tests/gpu/test_churn.py", "tests/gpu/test_speculation.py", "-n", "2"),
    "FP8 and images": ("tests/gpu/test_fp8.py", "tests/gpu/test_vision.py", "-n", "2"),
    "4 and 8 bits": ("tests/gpu/test_coded.py",),
    "compiled pieces": ("tests/gpu/test_compiled_pieces.py", "tests/gpu/test_tune.py", "-n", "2"),
    "deterministic": ("tests/gpu/test_deterministic.py", "-n", "7", "--dist", "loadgroup"),
    "deterministic traffic": ("tests/gpu/test_deterministic_traffic.py", "-n", "4", "--dist", "loadgroup"),
    "tiers": ("tests/gpu/test_offload.py",),
    "rollouts": ("tests/gpu/test_rollouts.py",),
    "memory": ("tests/gpu/test_memory.py", "tests/gpu/test_shared_device.py"),
}
PATIENCE = 8.0
"""Seconds in which pytest says what failed before it is ended."""
ROOT = Path(__file__).resolve().parents[2]


def spread(options: tuple[str, ...], num_devices: int) -> list[str]:
    """Options with twice the workers if there are several devices, which come with more processors."""
    doubled = list(options)
    if num_devices > 1 and "-n" in doubled:
        place = doubled.index("-n") + 1
        doubled[place] = str(2 * int(doubled[place]))
    return doubled


def end(children: list[subprocess.Popen[bytes]]) -> None:
    """Let pytest name the failures of groups that run too long, then end them."""
    for child in children:
        child.send_signal(signal.SIGINT)
    until = time.monotonic() + PATIENCE
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def outcome(log: str, status: int | None) -> dict[str, Any]:
    """Counts of a group's last line, and the names of tests that failed; ``status`` None: it did not end in time."""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", log.rpartition("\n==")[2])}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    return {"finished": status is not None, "status": status, **counts, "failures": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=540.0, help="end groups that run longer")
    parser.add_argument("--logs", help="folder for the output of each group")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="default: all")
    args = parser.parse_args()
    target = report.open_json(args.json)
    options = ["-o", "addopts=--strict-markers", "-q", "-rf", "--tb=short", "--durations=20"]
    pytest = [sys.executable, "-m", "pytest", *options]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(args.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices, running = visible.split(","), {}
        for number, name in enumerate(args.groups):
            log = logs / f"{number}-{name.replace(' ', '-').replace(',', '')}.log"
            device = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": devices[number % len(devices)]}
            with log.open("w") as output:
                child = subprocess.Popen(
                    [*pytest, *spread(GROUPS[name], len(devices))],
                    stdout=output,
                    stderr=output,
                    cwd=ROOT,
                    env=os.environ | device,
                )
            running[name] = (child, log)
        deadline = time.monotonic() + args.seconds
        while running:
            time.sleep(1)
            states = {name: child.poll() for name, (child, _) in running.items()}
            is_late = time.monotonic() >= deadline
            if is_late:
                end([running[name][0] for name, status in states.items() if status is None])
            for name, status in states.items():
                if status is None and not is_late:
                    continue
                found[name] = outcome(running.pop(name)[1].read_text(), status)
                print(name, found[name], flush=True)
                report.write_json(target, report.provenance("cuda") | {"groups": found})
    return int(any(group["status"] != 0 for group in found.values()))


if __name__ == "__main__":
    sys.exit(main())
