"""Measure the documents' figures of one GPU again, each job into a JSON file of its own.

    python benchmarks/gpu_tables.py --output DIR [--group GROUP …] [--only WORD …] [--gpus N] [--seconds 560]

Every job is a process of its own, because only fresh processes compare; with ``--gpus`` as many run at a time, one on
each GPU. What would not end within ``--seconds`` by its estimate is not begun, and is named at the end. Afterwards put
the files into ``benchmarks/results`` and run ``python docs/make_tables.py``, which writes the tables of the documents
from them.

``tables`` measures models A and B with graphs: starts, prefix reuse, long prompts, parts of a queue's time. ``modes``:
without graphs, in pieces, compiled. ``fp8``: E, A beside bf16, long contexts by cache. ``hybrids``: the other hybrid
models. ``models-bf16`` and ``models-fp8``: ten models. ``more``: drafts, images, accuracy. ``choices``: what defaults
rest on (segments of long prompts, width of page tables, modes by measurement). All but ``choices`` is the default.
Several GPUs: ``benchmarks/tensor_parallel.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = ("16", "64", "128", "256", "512", "1024", "2048", "8192")
LONG = ("4608", "6144", "8192", "12288", "16000")
BF16_STATE = {"mamba_ssm_dtype": "bfloat16"}
A, B = "qwen3-0.6b", "qwen3-next-12l"
PIECES = {"cuda_graph_mode": "FULL_AND_PIECEWISE"}
COMPILED = {"enable_torch_compile": True, "torch_compile_max_bs": 32}


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: the ``name`` of its result file, the command, and an upper bound of its seconds."""

    name: str
    command: tuple[str, ...]
    seconds: int


def _report(name: str, seconds: int, model: str, settings: Mapping[str, object], *flags: str) -> Job:
    state = BF16_STATE if model == B else {}
    given = json.dumps({**state, **settings})
    return Job(name, ("benchmarks/gpu_report.py", "--model", model, "--settings", given, *flags), seconds)


def _bench(name: str, seconds: int, model: str, kind: str, *flags: str) -> Job:
    state = ("--mamba-ssm-dtype", "bfloat16") if model == B else ()
    common = ("--model", f"benchmarks/configs/{model}", "--load-format", "dummy", "--skip-tokenizer-init")
    return Job(name, ("-m", "weft", "bench", kind, *common, "--max-model-len", "16384", *state, *flags), seconds)


def _tables() -> list[Job]:
    jobs = []
    for model, batches, seconds in ((A, ("1", "8", "32", "128", "256"), 50), (B, ("1", "8", "32", "128"), 60)):
        state = "-bf16-state" if model == B else ""
        own = json.dumps(BF16_STATE if model == B else {})
        jobs += [
            _report(f"engine-{model}{state}-h200", seconds, model, {}, "--batches", *batches, "--lengths", *LENGTHS,
                    "--throughput"),
            _report(f"first-token-long-{model}-h200", 30, model, {"max_model_len": 40960}, "--lengths", "512", "1024",
                    "2048", "8192", "12288", "32000"),
            Job(f"step-gaps-{model}-h200", ("benchmarks/step_gaps.py", "--model", model, "--repeats", "2", "--settings",
                                            own), 40),
        ]  # fmt: skip
    return [
        *jobs,
        _report(f"engine-{B}-fp32-state-h200", 40, B, {"mamba_ssm_dtype": "float32"}, "--batches", "1", "8", "32",
                "128", "--lengths", "1024", "8192", "--repeats", "3"),
        _bench("w5-h200", 30, B, "prefix", "--max-num-seqs", "64"),
        _bench("w5-off-h200", 30, B, "prefix", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
        _bench(f"startup-{A}-h200", 40, A, "startup", "--cold-repeats", "1", "--warm-repeats", "3"),
        _bench(f"startup-{B}-h200", 40, B, "startup", "--cold-repeats", "1", "--warm-repeats", "2"),
    ]  # fmt: skip


def _modes() -> list[Job]:
    few = ("--batches", "1", "8", "32", "128", "--repeats", "1", "--lengths", *LENGTHS)
    inductor = PIECES | {"piecewise_cuda_graph_compiler": "inductor"}
    jobs = []
    for model in (A, B):
        jobs += [
            _report(f"engine-{model}-eager-h200", 35, model, {"cuda_graph_mode": "NONE"}, *few),
            _report(f"engine-{model}-compiled-h200", 45, model, COMPILED, "--batches", "1", "8", "32"),
            _report(f"prefill-{model}-piecewise-h200", 25, model, PIECES, "--lengths", *LENGTHS),
            _report(f"prefill-{model}-inductor-h200", 35, model, inductor, "--lengths", *LENGTHS),
        ]
    gdn = PIECES | {"splitting_ops": ["+gated_delta_net"]}
    return [*jobs, _report(f"prefill-{B}-piecewise-gdn-split-h200", 25, B, gdn, "--lengths", *LENGTHS)]


def _fp8() -> list[Job]:
    e, few = "qwen3-next-48l-fp8", ("--batches", "1", "8", "32", "128", "--repeats", "2")
    beside = (*few, "--lengths", "512", "8192", "--throughput")
    jobs = [
        _report(f"engine-{e}-fused-h200", 105, e, BF16_STATE, *few, "--lengths", "16", "128", "512", "1024", "2048",
                "8192", "--throughput"),
        _report(f"startup-{e}-warm-h200", 20, e, BF16_STATE),
        _report(f"engine-{A}-bf16-beside-fp8-h200", 40, A, {}, *beside),
        _report(f"engine-{A}-fp8-h200", 45, A, {"quantization": "fp8"}, *beside),
    ]  # fmt: skip
    for cache, dtype in (("bf16", "auto"), ("fp8", "fp8")):
        settings = json.dumps({"max_model_len": 40960, "max_num_seqs": 64, "kv_cache_dtype": dtype})
        long = ("--batches", "8", "64", "--context", "32640", "8100", "--settings", settings)
        command = ("benchmarks/decode_profile.py", "--model", A, *long)
        jobs.append(Job(f"decode-long-context-{A}-{cache}-kv-h200", command, 25))
    return jobs


def _hybrids() -> list[Job]:
    flags = ("--batches", "1", "32", "128", "--lengths", "512", "4096", "--repeats", "3")
    settings = {"max_model_len": 8192, "max_num_seqs": 128}
    models = {"nemotron-h-8b": 75, "gpt-oss-20b": 60, "granite-4.0-h-tiny": 50, "jamba-mini-8l": 50,
              "kimi-linear-12l": 35, "lfm2-8b-a1b": 30, "ling-3.0-flash-12l": 45,
              "glm-5.3-flash-8l": 60, "qwen4-exp-12l": 50}  # fmt: skip
    return [_report(f"engine-{model}-h200", seconds, model, settings, *flags) for model, seconds in models.items()]


def _models(form: str) -> list[Job]:
    flags = ("--batches", "1", "8", "32", "128", "--lengths", "512", "4096", "--repeats", "2")
    settings: dict[str, object] = {"max_model_len": 8192, "max_num_seqs": 128}
    settings |= {"quantization": "fp8"} if form == "fp8" else {}
    models = {
        "hybrid-27b": 60, "llama-3.1-8b": 35, "qwen3-8b": 35, "qwen3-32b": 65, "qwen3-30b-a3b": 45,
        "qwen3.5-35b-a3b": 45, "falcon-h1-34b": 75, "nemotron-h-8b": 40, "granite-4.0-h-tiny": 35, "lfm2-8b-a1b": 30,
    }  # fmt: skip
    own = {"hybrid-27b": BF16_STATE, "qwen3.5-35b-a3b": BF16_STATE, "falcon-h1-34b": BF16_STATE}
    return [
        _report(f"models-{model}-{form}-h200", seconds, model, settings | own.get(model, {}), *flags)
        for model, seconds in models.items()
    ]


def _more() -> list[Job]:
    return [
        Job("speculation-h200", ("benchmarks/speculation.py",), 75),
        Job("repetition-h200", ("benchmarks/repetition.py", "--drafts", "8", "4", "15"), 60),
        Job("vision-qwen3-vl-2b-h200", ("-m", "benchmarks.vision"), 60),
        Job("weft-eval-fp8-h200", ("-m", "weft", "eval", "--quantization", "fp8"), 25),
    ]


def _choices() -> list[Job]:
    tables = "benchmarks/context_tables.py"
    own = (tables, "--model", B, "--settings", json.dumps(BF16_STATE), "--max-model-lens", "262144", "--batches", "1",
           "8", "--contexts", "1000", "15000", "--rules", "long splits", "short splits", "held to 4096")  # fmt: skip
    jobs = [
        Job(f"context-tables-{A}-h200", (tables, "--model", A, "--rules", "as it is", "long splits", "held to 4096",
                                         "held to 16384"), 65),
        Job(f"context-tables-{B}-h200", own, 45),
    ]  # fmt: skip
    long = {
        "no-graph": {}, "one-graph": {"piecewise_cuda_graph_max_tokens": 8192},
        "segments": {"max_num_batched_tokens": 4096},
    }  # fmt: skip
    for model in (A, B):
        for name, settings in long.items():
            jobs.append(_report(f"long-prefill-{model}-{name}-h200", 15, model, settings, "--lengths", *LONG))
    for model, state in ((B, ("--mamba-ssm-dtype", "bfloat16")), (A, ())):
        flags = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "16384", "--max-num-seqs", "64",
                 "--piecewise-cuda-graph-tokens", "128", "1024", "8192", "--lengths", "16", "100", "140", "512", "1000",
                 "1100", "3000", "8000", "--batches", "1", "8", "50", "--repeats", "9")  # fmt: skip
        choice = ("benchmarks/tuned_choice.py", "--model", f"benchmarks/configs/{model}", *flags, *state)
        jobs.append(Job(f"tuned-choice-{model}-h200", choice, 75))
    return jobs


GROUPS: dict[str, Callable[[], list[Job]]] = {
    "tables": _tables, "modes": _modes, "fp8": _fp8, "hybrids": _hybrids, "models-bf16": partial(_models, "bf16"),
    "models-fp8": partial(_models, "fp8"), "more": _more, "choices": _choices,
}  # fmt: skip


def run(job: Job, output: Path, limit: float, gpu: str | None = None) -> tuple[bool, str]:
    """Run one job, on that GPU alone. Returns whether it went well, and how it ended."""
    command = [sys.executable, *job.command, "--json", str(output / f"{job.name}.json")]
    seen = os.environ if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    try:
        done = subprocess.run(command, cwd=ROOT, env=seen, timeout=limit, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return False, f"no end within {limit:.0f} s"
    (output / f"{job.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    return done.returncode == 0, f"exit status {done.returncode}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    default = [name for name in GROUPS if name != "choices"]
    parser.add_argument("--group", nargs="+", choices=list(GROUPS), default=default, help="default: all but choices")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="jobs whose names contain one of these")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="jobs at a time, each on a GPU of its own")
    parser.add_argument("--seconds", type=float, default=560, metavar="X")
    parser.add_argument("--list", action="store_true", help="say what would run")
    args = parser.parse_args(argv)
    asked = [job for name in args.group for job in GROUPS[name]()]
    jobs = [job for job in asked if any(word in job.name for word in args.only)]
    if args.list:
        print("\n".join(f"{job.seconds:4} s  {job.name}: {' '.join(job.command)}" for job in jobs))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(args.gpus)]
    if len(gpus) < args.gpus:
        parser.error(f"--gpus {args.gpus}: CUDA_VISIBLE_DEVICES={visible} has {len(gpus)}")
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in gpus[: args.gpus]:
        free.put(gpu if args.gpus > 1 else None)

    def one(job: Job) -> bool:
        gpu = free.get()
        left = args.seconds - (time.monotonic() - started)
        try:
            if left < job.seconds:
                went, how = False, f"not begun: {left:.0f} s are left of {job.seconds} needed"
            else:
                went, how = run(job, args.output, left, gpu)
        finally:
            free.put(gpu)
        print(f"{time.monotonic() - started:6.1f} s  {job.name}: {how}", flush=True)
        return went

    with ThreadPoolExecutor(args.gpus) as threads:
        bad = [job.name for job, went in zip(jobs, threads.map(one, jobs), strict=True) if not went]
    print(f"missing or failed: {', '.join(bad) or 'nothing'}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
