"""FP8 on one H200, beside bf16: the figures of docs/performance.md, one process after the other.

    python -m benchmarks.fp8_report --out FOLDER [--only NAME ...]

Each part is a command that writes its own JSON into the folder; what a part prints is printed. A part that fails or
takes too long does not keep the others from running.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

LONG = ["--batches", "8", "64", "--context", "32640", "8100"]
"""Decode steps of 8 requests with 32k tokens each, and of 64 with 8k."""


def gpu_report(model: str, *args: str, **settings: object) -> list[str]:
    return ["benchmarks/gpu_report.py", "--model", model, *args, "--settings", json.dumps(settings)]


def long_contexts(kv_cache_dtype: str) -> list[str]:
    settings = {"max_model_len": 40960, "max_num_seqs": 64, "kv_cache_dtype": kv_cache_dtype}
    return ["benchmarks/decode_profile.py", "--model", "qwen3-0.6b", *LONG, "--settings", json.dumps(settings)]


DECODE = ["--batches", "1", "8", "32", "128", "--repeats", "2"]
E_LENGTHS = ["--lengths", "16", "128", "512", "1024", "2048", "8192"]
A_LENGTHS = ["--lengths", "512", "8192"]

PARTS = {
    "engine-qwen3-next-48l-fp8-fused-h200": gpu_report("qwen3-next-48l-fp8", *DECODE, *E_LENGTHS, "--throughput",
                                                       mamba_ssm_dtype="bfloat16"),
    "startup-qwen3-next-48l-fp8-warm-h200": gpu_report("qwen3-next-48l-fp8", mamba_ssm_dtype="bfloat16"),
    "engine-qwen3-0.6b-bf16-beside-fp8-h200": gpu_report("qwen3-0.6b", *DECODE, *A_LENGTHS, "--throughput"),
    "engine-qwen3-0.6b-fp8-h200": gpu_report("qwen3-0.6b", *DECODE, *A_LENGTHS, "--throughput", quantization="fp8"),
    "decode-long-context-qwen3-0.6b-bf16-kv-h200": long_contexts("auto"),
    "decode-long-context-qwen3-0.6b-fp8-kv-h200": long_contexts("fp8"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", default=list(PARTS), help="beginnings of names of parts")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each part")
    args = parser.parse_args()
    for name, command in PARTS.items():
        if not name.startswith(tuple(args.only)):
            continue
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *command, "--json", str(Path(args.out) / f"{name}.json")], timeout=args.limit
            ).returncode
        except subprocess.TimeoutExpired:
            done = -1
        print(f"{name}: {time.perf_counter() - start:.0f} s, exit {done}", flush=True)


if __name__ == "__main__":
    main()
