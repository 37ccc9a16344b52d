"""Measure the cost of log probabilities in decoding, raw and processed.

    python -m benchmarks.logprobs --model qwen3-next-12l --json FILE

Each row is a batch of random prompts, sampled with temperature, top-k and top-p. A step's milliseconds are the
difference of a long and a short answer over their tokens. The model has dummy weights, or is the bundled one.
Python's collector does not visit the objects of the start, as in a server's engine process.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from weft import LLM, SamplingParams
from weft.bench import report

CONFIGS = Path(__file__).parent / "configs"
SHORT, LONG = 16, 80


def batch_seconds(llm: LLM, batch: int, num_tokens: int, logprobs: int | None) -> float:
    params = SamplingParams(
        temperature=0.8, top_k=50, top_p=0.95, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs, seed=1
    )
    prompts = [[random.randrange(10, 900) for _ in range(64)] for _ in range(batch)]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def step_ms(llm: LLM, batch: int, logprobs: int | None, repeats: int) -> float:
    """Milliseconds of a decode step, the median of ``repeats``."""
    times = []
    for _ in range(1 + repeats):
        long, short = (batch_seconds(llm, batch, count, logprobs) for count in (LONG, SHORT))
        times.append(1e3 * (long - short) / (LONG - SHORT))
    return round(median(times[1:]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder in benchmarks/configs; without it the bundled model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    args = parser.parse_args()
    target = report.open_json(args.json)
    found: dict[str, Any] = report.provenance(args.device) | {"model": args.model or "bundled", "step_ms": {}}
    dummy: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2048} if args.model else {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        llm = LLM(
            str(CONFIGS / args.model) if args.model else None, skip_tokenizer_init=True, max_num_seqs=max(args.batches),
            device=args.device, logprobs_mode=mode, gpu_memory_utilization=0.45, **dummy,
        )  # fmt: skip
        gc.collect()
        gc.freeze()
        for batch in args.batches:
            row = {
                name: step_ms(llm, batch, logprobs, args.repeats)
                for name, logprobs in (("none", None), ("sampled", 0), ("five", 5))
            }
            found["step_ms"].setdefault(str(batch), {})[mode] = row
            print(mode, batch, row, flush=True)
            report.write_json(target, found | {"settings": report.settings(llm.config)})
        llm.shutdown()
        gc.unfreeze()


if __name__ == "__main__":
    main()
