"""Measure the cost of copies inside the caches on a GPU: forks of recurrent states, and partial pages.

    python benchmarks/fork_cost.py --model qwen3-next-12l --json FILE

Host time of the call, and device time, beside the floor: the bytes read and written at the device's copy speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode_profile import CONFIGS, graph_ms
from weft.bench import report
from weft.bench.roofline import ceilings_of
from weft.config import resolve
from weft.runner.model_runner import ModelRunner


def host_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds until the call returns; the device is idle before each."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-next-12l")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    base = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384, "max_num_seqs": 128,
        "device": "cuda", "cuda_graph_mode": "NONE",
    }  # fmt: skip
    runner = ModelRunner(resolve(model=str(CONFIGS / args.model), **(base | json.loads(args.settings))))
    ceilings = ceilings_of("cuda")
    assert ceilings is not None
    spec, rows = runner.spec, []
    for count in args.counts:
        orders = [(1 + i, 1 + count + i) for i in range(count)]
        for name, num_bytes in (("states", spec.slot_bytes), ("pages", spec.kv_bytes_per_token * spec.page_size)):
            run = lambda name=name, orders=orders: runner.steps.copier.copy(**{name: orders})  # noqa: E731
            row = {
                "what": name, "count": count, "host_ms": host_ms(run), "device_ms": graph_ms(run),
                "floor_ms": 2e3 * count * num_bytes / ceilings.bytes_per_s,
            }  # fmt: skip
            rows.append(row)
            print(" ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    result = {"benchmark": "fork_cost", **report.provenance("cuda"), "model": args.model, "rows": rows}
    Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
