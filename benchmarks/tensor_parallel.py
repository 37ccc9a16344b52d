"""Tensor parallelism on the GPUs of one machine: checks, then figures, in one command that ends in time.

Usage: ``python -m benchmarks.tensor_parallel [--ranks 2] [--config benchmarks/configs/qwen3-next-48l] [--out DIR]``.

Stages run in processes of their own, each with a time limit; a stage that fails or is late costs its own figures only:

1. all-reduce: the fused kernel and NCCL, checked and timed over sizes;
2. engine: cold start with an empty Triton cache, decode, first token, throughput (W2, W3, W1 of docs/performance.md),
   with bf16 dummy weights and bf16 states; with the fused all-reduce unless stage 1 failed;
3. tests: ``tests/multi_gpu``, but for those of stage 1;
4. engine again, a warm start, with NCCL's all-reduce: decode.

Nothing begins or goes on after ``--limit`` seconds.

JSON goes to ``--out`` (default: the folder named by OUT); a table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kernels.measure import ON_GPU

BATCHES = (1, 8, 32, 128) if ON_GPU else (1, 2)
LENGTHS = (16, 128, 512, 1024, 2048, 8192) if ON_GPU else (16, 40)
STAGES = ("all_reduce", "engine_cold", "tests", "engine_warm_nccl")
PEER = {
    "decode_ms": {1: 5.10, 8: 7.28, 32: 13.5, 128: 23.1},
    "first_token_ms": {16: 71, 128: 74, 512: 55, 1024: 135, 2048: 128, 8192: 141},
    "tokens_per_s": 5478,
}
"""vLLM 0.26 on two H200, see docs/performance.md."""
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 16384 if ON_GPU else 256,
    "enable_prefix_caching": False,
    "mamba_ssm_dtype": "bfloat16",
    "gpu_memory_utilization": 0.9,
}


def engine(began: float, settings: dict[str, Any], wanted: list[str], path: Path) -> None:
    """Stages 3 and 4, in their own process. What is there is written after every part."""
    imported = time.monotonic()
    from weft import LLM, report
    from weft.bench import latency, prefill, throughput

    loaded = time.monotonic()
    with LLM(**settings) as llm:
        ready = time.monotonic()
        found: dict[str, Any] = report.provenance(llm.config.device) | {"config": report.settings(llm.config)}
        found["start"] = {"total_s": ready - began, "import_s": loaded - imported, "stages": llm.startup}

        def keep(name: str, figures: Any) -> None:
            found[name] = figures
            path.write_text(json.dumps(found, indent=1))

        keep("plan", {"num_pages": llm._core.plan.num_pages, "num_slots": llm._core.plan.num_slots})
        if "decode" in wanted:
            repeats, prompt, output = (3, 1024, 128) if ON_GPU else (1, 8, 4)
            work = latency.LatencyWorkload(BATCHES, prompt, output, repeats=repeats)
            keep("decode", [latency.measure_batch(llm, work, b, None) for b in BATCHES])
        if "first_token" in wanted:
            workload = prefill.PrefillWorkload(LENGTHS, repeats=9 if ON_GPU else 2)
            keep("first_token", [prefill._measure_length(llm, workload, n, None) for n in LENGTHS])
        if "throughput" in wanted:
            tiny = {} if ON_GPU else {"num_prompts": 3, "prompt_len": (4, 9), "output_len": (2, 5)}
            keep("throughput", throughput.measure(llm, throughput.ThroughputWorkload(**tiny)))
        print("shutting down", flush=True)
    found["ended"] = True
    path.write_text(json.dumps(found, indent=1))


class Run:
    """Stages in order, with what each left."""

    def __init__(self, ranks: int, config: str, out: Path, limit_s: float) -> None:
        self.ranks, self.config, self.out = ranks, config, out
        self._deadline = time.monotonic() + limit_s
        self.results: dict[str, Any] = {}

    def stage(self, name: str, command: list[str], limit_s: float, **environment: str) -> bool:
        """Run ``command``; its output goes to ``<out>/<name>.log``. Returns whether it ended well."""
        began = time.monotonic()
        limit_s = min(limit_s, self._deadline - began)
        if limit_s < 5:
            self.results[f"{name} stage"] = "no time left"
            return False
        with (self.out / f"{name}.log").open("w") as log:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, env=os.environ | environment
                )
                status = "ok" if done.returncode == 0 else f"status {done.returncode}"
            except subprocess.TimeoutExpired:
                status = f"later than {limit_s:.0f} s"
        seconds = time.monotonic() - began
        self.results[f"{name} stage"] = f"{status}, {seconds:.0f} s"
        print(f"[{name}] {status}, {seconds:.0f} s", flush=True)
        if status != "ok":
            print("\n".join((self.out / f"{name}.log").read_text(errors="replace").splitlines()[-25:]), flush=True)
        return status == "ok"

    def engine(self, name: str, wanted: str, limit_s: float, cache: str, **settings: Any) -> dict[str, Any]:
        path = self.out / f"{name}.json"
        path.unlink(missing_ok=True)
        given = SETTINGS | {"model": self.config, "tensor_parallel_size": self.ranks} | settings
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--engine", json.dumps(given)]
        command += ["--wanted", wanted, "--began", repr(time.monotonic()), "--json", str(path)]
        self.stage(name, command, limit_s, TRITON_CACHE_DIR=cache)
        self.results[name] = json.loads(path.read_text()) if path.exists() else {}
        return self.results[name]

    def all(self, stages: list[str]) -> None:
        python, all_reduce = sys.executable, self.out / "all_reduce.json"
        fused = True
        if "all_reduce" in stages:
            command = [python, "-m", "benchmarks.kernels.all_reduce", "--json", str(all_reduce)]
            fused = self.stage("all_reduce", [*command, "--ranks", str(self.ranks)], 75)
            self.results["all_reduce"] = json.loads(all_reduce.read_text()) if all_reduce.exists() else {}
        own = {"enable_custom_all_reduce": True} if ON_GPU and fused else {}
        with tempfile.TemporaryDirectory(prefix="weft-triton-") as cache:
            if "engine_cold" in stages:
                everything = "decode first_token throughput"
                self.engine("engine_cold", everything, 190, cache, **own)
            if "tests" in stages:
                tests = ["pytest", "-q", "-n0", "-p", "no:cacheprovider", "tests/multi_gpu", "--durations=6"]
                self.stage("tests", [python, "-m", *tests, "-k", "generate"], 140)
            if "engine_warm_nccl" in stages:
                self.engine("engine_warm_nccl", "decode", 90, cache)

    def table(self) -> None:
        print("\nall-reduce + norm, us      fused      NCCL + norm")
        for row in self.results.get("all_reduce", {}).get("rows", ()):
            print(f"{row['rows']:6} rows {row['kib']:9.0f} KiB {row.get('fused_us', '-'):>9} {row.get('plain_us'):>9}")
        for name in ("engine_cold", "engine_warm_nccl"):
            found = self.results.get(name) or {}
            start = found.get("start", {})
            print(f"\n{name}: start {start.get('total_s', 0):.1f} s, import {start.get('import_s', 0):.1f} s")
            stages = start.get("stages", {})
            print("  " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items() if seconds >= 0.1))
            for row in found.get("decode", ()):
                batch = row["batch_size"]
                peer = PEER["decode_ms"].get(batch)
                print(f"  decode {batch:4}: {row['step_ms']} ms, interval {row['interval_ms']}, peer {peer}")
            for row in found.get("first_token", ()):
                peer = PEER["first_token_ms"].get(row["prompt_len"])
                print(f"  first token {row['prompt_len']:5}: {row['first_token_ms']} ms, peer {peer}")
            if "throughput" in found:
                print(f"  W1: {found['throughput']['output_tokens_per_s']} tokens/s, peer {PEER['tokens_per_s']}")
        print("\n" + "\n".join(f"{k}: {v}" for k, v in self.results.items() if k.endswith("stage")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", default="benchmarks/configs/qwen3-next-48l")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--limit", type=float, default=420.0)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    for hidden in ("--engine", "--wanted", "--began", "--json"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(float(args.began), json.loads(args.engine), args.wanted.split(), Path(args.json))
        return
    run = Run(args.ranks, args.config, Path(args.out), args.limit)
    try:
        run.all(args.stages)
    finally:
        (run.out / "tensor_parallel.json").write_text(json.dumps(run.results, indent=1))
        run.table()


if __name__ == "__main__":
    main()
