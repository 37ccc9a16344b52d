"""All figures of one GPU that docs/performance.md holds, measured again in one run: a JSON file each.

    python benchmarks/gpu_tables.py --output DIR [--group tables | choices | all] [--only WORD …] [--seconds 560]

Every job is a process of its own, because only fresh processes compare. What would not end within ``--seconds`` by its
estimate is not begun, and is named at the end. Afterwards put the files into ``benchmarks/results`` and run
``python docs/make_tables.py``, which writes the tables of the documents from them.

``tables``: engine figures with graphs, without, in pieces; starts; prefix reuse. ``choices``: what defaults rest on
(segments of long prompts, width of page tables, modes by measurement).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """One measurement: ``name`` of its file, what is run, and the seconds that it takes or less."""

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
    for model, batches, full in ((A, ("1", "8", "32", "128", "256"), 65), (B, ("1", "8", "32", "128"), 75)):
        state = "-bf16-state" if model == B else ""
        few = ("--batches", "1", "8", "32", "128", "--repeats", "1")
        jobs += [
            _report(f"engine-{model}{state}-h200", full, model, {}, "--batches", *batches, "--lengths", *LENGTHS,
                    "--throughput"),
            _report(f"engine-{model}-eager-h200", 35, model, {"cuda_graph_mode": "NONE"}, *few, "--lengths", *LENGTHS),
            _report(f"engine-{model}-compiled-h200", 45, model, COMPILED, "--batches", "1", "8", "32"),
            _report(f"prefill-{model}-piecewise-h200", 25, model, PIECES, "--lengths", *LENGTHS),
            _report(f"prefill-{model}-inductor-h200", 35, model, PIECES | {"piecewise_cuda_graph_compiler": "inductor"},
                    "--lengths", *LENGTHS),
        ]  # fmt: skip
    gdn = PIECES | {"splitting_ops": ["+gated_delta_net"]}
    jobs += [
        _report(f"prefill-{B}-piecewise-gdn-split-h200", 25, B, gdn, "--lengths", *LENGTHS),
        _bench("w5-h200", 30, B, "prefix", "--max-num-seqs", "64"),
        _bench("w5-off-h200", 30, B, "prefix", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
        _bench(f"startup-{A}-h200", 40, A, "startup", "--cold-repeats", "1", "--warm-repeats", "3"),
        _bench(f"startup-{B}-h200", 40, B, "startup", "--cold-repeats", "1", "--warm-repeats", "2"),
    ]
    order = ("engine-", "w5", "startup", "prefill")  # what matters most goes first
    return sorted(jobs, key=lambda job: next(i for i, word in enumerate(order) if job.name.startswith(word)))


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


ORDER = ("w5", f"engine-{A}-compiled", f"tuned-choice-{B}", f"engine-{A}-h200", f"engine-{B}-bf16", "engine", "startup")
"""What matters most goes first where all is asked for: beginnings of names."""


def _all() -> list[Job]:
    def rank(job: Job) -> int:
        return next((i for i, start in enumerate(ORDER) if job.name.startswith(start)), len(ORDER))

    return sorted(_tables() + _choices(), key=rank)


GROUPS = {"tables": _tables, "choices": _choices, "all": _all}


def run(job: Job, output: Path, limit: float) -> tuple[bool, str]:
    """Run one job. Returns whether it went well, and how it ended."""
    command = [sys.executable, *job.command, "--json", str(output / f"{job.name}.json")]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=limit, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return False, f"no end within {limit:.0f} s"
    (output / f"{job.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    return done.returncode == 0, f"exit status {done.returncode}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--group", choices=list(GROUPS), default="tables")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="jobs whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=560, metavar="X")
    parser.add_argument("--list", action="store_true", help="say what would run")
    args = parser.parse_args(argv)
    jobs = [job for job in GROUPS[args.group]() if any(word in job.name for word in args.only)]
    if args.list:
        print("\n".join(f"{job.seconds:4} s  {job.name}: {' '.join(job.command)}" for job in jobs))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    started, bad = time.monotonic(), []
    for job in jobs:
        left = args.seconds - (time.monotonic() - started)
        if left < job.seconds:
            went, how = False, f"not begun: {left:.0f} s are left of {job.seconds} needed"
        else:
            went, how = run(job, args.output, left)
        print(f"{time.monotonic() - started:6.1f} s  {job.name}: {how}", flush=True)
        bad += [] if went else [job.name]
    print(f"missing or failed: {', '.join(bad) or 'nothing'}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
