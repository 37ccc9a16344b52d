"""Figures of the engine on one GPU, for the models in ``benchmarks/configs``: one JSON object and a short table.

    python benchmarks/gpu_report.py --model qwen3-0.6b --batches 1 8 32 128 256 --json FILE

Weights are random (``load_format="dummy"``), prompts are random token ids; the methods are those of ``weft bench``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
STARTED = time.perf_counter()

from weft import LLM  # noqa: E402
from weft.bench import (  # noqa: E402
    latency,
    prefill,
    report,
    throughput,
)
from weft.bench.roofline import ceilings_of  # noqa: E402

CONFIGS = Path(__file__).parent / "configs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--settings", default="{}", help="JSON of further engine settings")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384, "max_num_seqs": 256,
        "enable_prefix_caching": False,
    } | json.loads(args.settings)  # fmt: skip
    with LLM(os.path.relpath(CONFIGS / args.model), **settings) as llm:
        ready = round(time.perf_counter() - STARTED, 2)
        result = {
            "benchmark": "gpu_report",
            **report.provenance(llm.config.device),
            "model": args.model,
            "ready_s": ready,
        }
        result["startup"] = llm.startup
        ceilings = ceilings_of(llm.config.device)
        result["config"] = report.settings(llm.config)
        runner = llm._core._executor._runner  # type: ignore[attr-defined]
        captured = {
            "decode": runner.graphs.decode, "forward": runner.graphs.forward, "sample": runner.graphs.samples,
            "pieces": runner.graphs.pieces, "encoder": runner.media.graphs.graphs if runner.media else None,
        }  # fmt: skip
        result["graphs"] = {
            name: {
                "sizes": len(graphs.sizes), "seconds": graphs.counters.capture_seconds,
                "bytes": graphs.counters.capture_bytes,
            } for name, graphs in captured.items() if graphs is not None
        }  # fmt: skip
        print(args.model, "ready", ready, result["graphs"], flush=True)
        write = lambda: Path(args.json).write_text(json.dumps(result, indent=1, default=str))  # noqa: E731
        write()
        if args.batches:
            workload = latency.LatencyWorkload(tuple(args.batches), temperature=args.temperature, repeats=args.repeats)
            result["decode"] = []
            for batch in args.batches:
                row = latency.measure_batch(llm, workload, batch, ceilings)
                result["decode"].append(row)
                print(args.model, "decode", batch, row["step_ms"], "ms, floor", row["floor_ms"], flush=True)
                write()
        if args.lengths:
            result["prefill"] = prefill.measure(llm, prefill.PrefillWorkload(tuple(args.lengths)))
            for row in result["prefill"]:
                figures = (row["first_token_ms"], "ms, floor", row["floor_ms"])
                print(args.model, "prefill", row["prompt_len"], *figures, flush=True)
            write()
        if args.throughput:
            result["throughput"] = throughput.measure(llm, throughput.ThroughputWorkload())
            print(args.model, "throughput", result["throughput"]["output_tokens_per_s"], flush=True)
            write()


if __name__ == "__main__":
    main()
