"""Tensor parallelism on the GPUs of one machine: checks, then figures, in one command that ends in time.

Usage: ``python -m benchmarks.tensor_parallel [--ranks 2] [--config benchmarks/configs/qwen3-next-48l] [--out DIR]
[--stages engine_cold engine_warm] [--figures decode]``.

Each stage runs in its own process with a time limit. A stage that fails or is late costs its own figures only:

1. All-reduce: the fused kernel and NCCL, checked and timed over sizes.
2. Engine: cold start with an empty Triton cache, decode, first token, throughput as in docs/performance.md. It has bf16
   dummy weights and bf16 states, and NCCL's all-reduce if stage 1 failed.
3. Tests of ``tests/multi_gpu`` that generate on as many ranks.
4. Engine again, a warm start: decode.
5. Engine with NCCL's all-reduce: decode.
6. Scaling: ``weft bench scaling`` of models that fit one GPU (Qwen3-0.6B, Qwen3-Next of 12 layers).
7. Engine with whole experts on each rank: decode, first token.

Nothing begins or goes on after ``--limit`` seconds.

JSON goes to ``--out`` (default: the folder named by OUT); a table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ON_GPU = Path("/dev/nvidiactl").exists()
"""Without torch, which an engine loads while its ranks load theirs."""

BATCHES = (1, 8, 32, 128) if ON_GPU else (1, 2)
LENGTHS = (16, 128, 512, 1024, 2048, 8192) if ON_GPU else (16, 40)
ENGINES = ("engine_cold", "engine_warm", "engine_warm_nccl", "engine_warm_experts")
STAGES = ("all_reduce", "engine_cold", "tests", "engine_warm", "engine_warm_nccl", "scaling", "engine_warm_experts")
FIGURES = ("decode", "first_token", "throughput")
SIZES = "1x1 2x1 1x2"
SCALED = {2: {"qwen3-next-12l": SIZES, "qwen3-0.6b": SIZES}, 4: {"qwen3-next-48l": "2x2"}}
"""By ranks: models, and GPUs of a replica x replicas."""
SCALING = "--warmups 0 --repeats 1 --batch-sizes 1 32 128 --prompt-len 256"
if not ON_GPU:
    SCALED = {ranks: {"qwen3-0.6b": sizes["qwen3-0.6b"]} for ranks, sizes in SCALED.items() if ranks == 2}
    SCALING = "--warmups 0 --repeats 1 --batch-sizes 1 --prompt-len 8 --output-len 2 --num-prompts 2 --queue-len 2 4"
PEERS: dict[int, dict[str, Any]] = {
    2: {
        "decode_ms": {1: 5.10, 8: 7.28, 32: 13.5, 128: 23.1},
        "first_token_ms": {16: 71, 128: 74, 512: 55, 1024: 135, 2048: 128, 8192: 141},
        "tokens_per_s": 5478,
    },
    4: {
        "decode_ms": {1: 4.22, 8: 5.72, 32: 9.11, 128: 14.90},
        "first_token_ms": {16: 83, 128: 51, 512: 53, 1024: 170, 2048: 158, 8192: 127},
        "tokens_per_s": None,
    },
}
"""vLLM 0.26 on as many H200 with Qwen3-Next of 48 layers, see docs/performance.md."""
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 16384 if ON_GPU else 256,
    "enable_prefix_caching": False,
    "mamba_ssm_dtype": "bfloat16",
    "gpu_memory_utilization": 0.9,
}


def engine(began: float, settings: dict[str, Any], wanted: list[str], path: Path) -> None:
    """Run a stage of an engine in its own process. All figures so far are written after every part."""
    imported = time.monotonic()
    from weft import LLM

    loaded = time.monotonic()
    with LLM(**settings) as llm:
        ready = time.monotonic()
        from weft.bench import latency, prefill, report, throughput

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
            tiny: dict[str, Any] = {} if ON_GPU else {"num_prompts": 3, "prompt_len": (4, 9), "output_len": (2, 5)}
            keep("throughput", throughput.measure(llm, throughput.ThroughputWorkload(**tiny)))
        print("shutting down", flush=True)
    found["ended"] = True
    path.write_text(json.dumps(found, indent=1))


class Run:
    """Stages in order, with what each left."""

    def __init__(self, ranks: int, config: str, out: Path, limit_s: float) -> None:
        self.ranks, self.config, self.out = ranks, config, out
        out.mkdir(parents=True, exist_ok=True)
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
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )
            try:
                returned = process.wait(limit_s)
                status = "ok" if returned == 0 else f"status {returned}"
            except subprocess.TimeoutExpired:
                status = f"later than {limit_s:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
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

    def all(self, stages: list[str], figures: list[str]) -> None:
        python, all_reduce = sys.executable, self.out / "all_reduce.json"
        fused = True
        if "all_reduce" in stages:
            command = [python, "-m", "benchmarks.kernels.all_reduce", "--json", str(all_reduce)]
            fused = self.stage("all_reduce", [*command, "--ranks", str(self.ranks)], 75)
            self.results["all_reduce"] = json.loads(all_reduce.read_text()) if all_reduce.exists() else {}
        own = {} if fused else {"disable_custom_all_reduce": True}
        with tempfile.TemporaryDirectory(prefix="weft-triton-") as cache:
            if "engine_cold" in stages:
                self.engine("engine_cold", " ".join(figures), 190, cache, **own)
            if "tests" in stages:
                tests = ["pytest", "-q", "-n0", "-p", "no:cacheprovider", "tests/multi_gpu", "--durations=6"]
                self.stage("tests", [python, "-m", *tests, "-k", f"generate and {self.ranks}-ranks"], 140)
            if "engine_warm" in stages:
                self.engine("engine_warm", "decode", 90, cache, **own)
            if "engine_warm_nccl" in stages:
                self.engine("engine_warm_nccl", "decode", 90, cache, disable_custom_all_reduce=True)
            for name, sizes in SCALED.get(self.ranks, {}).items() if "scaling" in stages else ():
                self.scaling(name, sizes, cache, [] if fused else ["--disable-custom-all-reduce"])
            if "engine_warm_experts" in stages:
                self.engine("engine_warm_experts", "decode first_token", 90, cache, **own, enable_expert_parallel=True)

    def scaling(self, model: str, sizes: str, cache: str, flags: list[str]) -> None:
        """Measure the sizes in turn, so that finished figures are kept if the time is over."""
        command = [sys.executable, "-m", "weft", "bench", "scaling", "--model", f"benchmarks/configs/{model}", *flags]
        command += ["--load-format", "dummy", "--max-model-len", "2560" if ON_GPU else "64", *SCALING.split()]
        command += ["--mamba-ssm-dtype", "bfloat16"] if "next" in model else []
        rows = self.results[f"scaling-{model}"] = []
        for size in sizes.split():
            path = self.out / f"scaling-{model}-{size}.json"
            self.stage(path.stem, [*command, "--sizes", size, "--json", str(path)], 100, TRITON_CACHE_DIR=cache)
            found = json.loads(path.read_text() or "{}") if path.exists() else {}
            rows += found.get("results", [])

    def table(self) -> None:
        measured = PEERS if Path(self.config).name == "qwen3-next-48l" else {}
        peers = measured.get(self.ranks, {"decode_ms": {}, "first_token_ms": {}, "tokens_per_s": None})
        print("\nall-reduce + norm, us      fused      NCCL + norm")
        for row in self.results.get("all_reduce", {}).get("rows", ()):
            print(f"{row['rows']:6} rows {row['kib']:9.0f} KiB {row.get('fused_us', '-'):>9} {row.get('plain_us'):>9}")
        for name in (name for name in ENGINES if self.results.get(name)):
            found = self.results[name]
            start = found.get("start", {})
            print(f"\n{name}: start {start.get('total_s', 0):.1f} s, import {start.get('import_s', 0):.1f} s")
            stages = start.get("stages", {})
            print("  " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items() if seconds >= 0.1))
            for row in found.get("decode", ()):
                batch = row["batch_size"]
                peer = peers["decode_ms"].get(batch)
                print(f"  decode {batch:4}: {row['step_ms']} ms, interval {row['interval_ms']}, peer {peer}")
            for row in found.get("first_token", ()):
                peer = peers["first_token_ms"].get(row["prompt_len"])
                print(f"  first token {row['prompt_len']:5}: {row['first_token_ms']} ms, peer {peer}")
            if "throughput" in found:
                print(f"  {found['throughput']['output_tokens_per_s']} tokens/s, peer {peers['tokens_per_s']}")
        for row in [row for name in SCALED.get(self.ranks, ()) for row in self.results.get(f"scaling-{name}", ())]:
            print("scaling " + "  ".join(f"{name} {value}" for name, value in row.items()))
        print("\n" + "\n".join(f"{k}: {v}" for k, v in self.results.items() if k.endswith("stage")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", default="benchmarks/configs/qwen3-next-48l")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--limit", type=float, default=420.0)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=FIGURES, help="of the engine that starts cold")
    for hidden in ("--engine", "--wanted", "--began", "--json"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(float(args.began), json.loads(args.engine), args.wanted.split(), Path(args.json))
        return
    run = Run(args.ranks, args.config, Path(args.out), args.limit)
    try:
        run.all(args.stages, args.figures)
    finally:
        from weft.bench import report  # late: an engine's own process loads it while its ranks start

        found = report.origin() | run.results
        (run.out / "tensor_parallel.json").write_text(json.dumps(found, indent=1))
        run.table()


if __name__ == "__main__":
    main()
