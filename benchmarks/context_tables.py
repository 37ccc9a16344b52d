"""Decode steps beside the context length that an engine is made for: what a wide page table costs short sequences.

    python benchmarks/context_tables.py --model qwen3-0.6b --max-model-lens 16384 40960 --batches 1 2 8 32 \
        --contexts 1000 4000 15000 30000 --json FILE

A graph of a decode step is captured for page tables of ``max_model_len`` tokens, and decode attention chooses tile and
splits by that width. For every width one engine runs per rule of ``RULES`` (the constants of ``attention/decode.py``
that the choice depends on). Each engine measures the milliseconds of a replayed step at every batch and context that
its caches hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode_profile import CONFIGS, decode_orders, graph_ms, padded_size
from weft.bench import report
from weft.config import resolve
from weft.ops.attention import decode as attention_decode
from weft.runner.model_runner import ModelRunner

ALWAYS = 1 << 30
RULES: dict[str, dict[str, int]] = {
    "as it is": {},
    "long splits": {"_DOUBLE_WORK": 0, "_HELD_TABLE": 16384},
    "short splits": {"_DOUBLE_WORK": 1 << 33, "_HELD_TABLE": 16384},
    "held to 4096": {"_HELD_TABLE": ALWAYS},
    "held to 16384": {"_HELD_TABLE": ALWAYS, "_HELD_SPLITS": 64},
}
"""By name: constants that differ from those of the code."""


@contextmanager
def rule(constants: dict[str, int]) -> Iterator[None]:
    before = {name: getattr(attention_decode, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(attention_decode, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(attention_decode, name, value)


def measure(args: argparse.Namespace, max_model_len: int) -> list[dict[str, Any]]:
    """Milliseconds of a step by batch and context, in one engine."""
    settings = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": max_model_len, "device": args.device,
        "max_num_seqs": max(args.batches), "cuda_graph_mode": "FULL_DECODE_ONLY", "cuda_graph_bs": args.batches,
    } | json.loads(args.settings)  # fmt: skip
    runner = ModelRunner(resolve(model=str(CONFIGS / args.model), **settings))
    graphs, rows = runner.graphs.decode, []
    assert graphs is not None
    for batch in args.batches:
        for context in args.contexts:
            pages = batch * runner.spec.pages_for(context + 1)
            if context + 1 >= max_model_len or pages >= runner.plan.num_pages:
                continue
            runner.run(decode_orders(runner, batch, context))
            replay = partial(graphs.replay, padded_size(runner, batch), batch)
            rows.append({"batch": batch, "context": context, "ms": round(replay_ms(replay, args), 4)})
    return rows


def replay_ms(replay: Callable[[], Any], args: argparse.Namespace) -> float:
    """Return the milliseconds of a replay on the device, or of the emulator on a CPU (a rehearsal)."""
    if args.device == "cuda":
        return graph_ms(replay, args.repeats)
    started = time.perf_counter()
    with torch.inference_mode():
        replay()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-lens", type=int, nargs="+", default=[16384, 40960])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 4000, 15000, 30000])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--settings", default="{}", help="JSON of further engine settings")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "context_tables", **report.provenance(args.device), "model": args.model}
    result["results"] = []
    for max_model_len in args.max_model_lens:
        for name in args.rules:
            with rule(RULES[name]):
                rows = measure(args, max_model_len)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            result["results"].append({"max_model_len": max_model_len, "rule": name, "steps": rows})
            shown = ", ".join(f"{row['batch']}x{row['context']} {row['ms']:.3f}" for row in rows)
            print(f"{args.model} of {max_model_len}, {name}: {shown}", flush=True)
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
