"""Measure the cost of a step that verifies drafts, compared with a decode step, and the gain of drafts.

    python benchmarks/speculation.py --json FILE [--model FOLDER] [--batch-sizes 1 8 32] [--drafts 2] [--device cuda]
                                     [--methods mtp ngram] [--rate 0.8] [--output-len 384]

Weights are dummies. ``plain`` is the engine without drafts, as it decodes by default (``weft bench latency``:
milliseconds per step). Then an engine runs for each method. Every request gets drafts in every step; with ``mtp`` a
random head makes them, and its time counts. Each draft is accepted with the given probability whatever is sampled
(``synthetic_acceptance_rate``). The figures are milliseconds per new token, milliseconds per step, and ``gain``. The
gain is the number of tokens that a sequence gets in the time in which ``plain`` gives it one, by the median intervals
between steps.

``decode`` is that engine with drafts switched off. ``ratio`` is a verifying step over a decode step: medians between
steps of whole batches, with ``mtp`` both with overlap. ``floor_ratio`` is the ratio of the two steps' memory traffic:
drafts choose experts of their own, as uniform routing would. ``benchmarks/repetition.py`` measures n-gram drafts where
a text does repeat.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft import LLM, SamplingParams
from weft.bench import report
from weft.bench.latency import LatencyWorkload, measure
from weft.bench.roofline import Roofline

CONFIGS = Path(__file__).parent / "configs"
STEPS, PROMPT = 40, 512


def step_ms(llm: LLM, batch_size: int) -> dict[str, Any]:
    """Median milliseconds between two steps in which the whole batch got tokens, and how they ran. Calls that give no
    result do not count: the step is still under way."""
    rng, vocab = random.Random(batch_size), llm.config.model_config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(batch_size)]
    modes = dict(llm.stats().steps_by_mode)
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=8 * STEPS, ignore_eos=True, detokenize=False, seed=seed)
        llm.add_request({"prompt_token_ids": prompt}, params)
    intervals: list[float] = []
    previous: float | None = None
    for _ in range(3 * STEPS + 40):
        num_outputs = len(llm.step())
        if not num_outputs:
            continue
        whole, now = num_outputs == batch_size, time.perf_counter()
        if whole and previous is not None:
            intervals.append(1e3 * (now - previous))
        previous = now if whole else None
        if len(intervals) == STEPS:
            break
    for name in list(llm._streams):
        llm.abort(name)
    while llm._core.has_work:
        llm._core.step()
    llm._core.reset_prefix_cache()
    after = llm.stats().steps_by_mode
    return {"ms": round(median(intervals), 3), "modes": {m: n - modes.get(m, 0) for m, n in after.items()}}


def steps_of(llm: LLM, batch_size: int, num_drafts: int) -> dict[str, Any]:
    """Both kinds of steps of an engine with drafts at one batch size."""
    planner = llm._core.scheduler.drafts
    assert planner is not None
    found: dict[str, Any] = {}
    for name, count in (("decode", 0), ("verify", num_drafts)):
        planner.max_drafts = count
        found[name] = step_ms(llm, batch_size)
    work, context = Roofline.of(llm.config), PROMPT + 1.5 * STEPS
    floors = [work.decode(batch_size, context, count).num_bytes for count in (0, num_drafts)]
    ratio = found["verify"]["ms"] / found["decode"]["ms"]
    return found | {"ratio": round(ratio, 3), "floor_ratio": round(floors[1] / floors[0], 3)}


def engine(args: argparse.Namespace, config: dict[str, Any] | None) -> LLM:
    return LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        device=args.device,
        max_num_seqs=max(args.batch_sizes),
        max_model_len=4096,
        speculative_config=config,
    )


def workload(args: argparse.Namespace) -> LatencyWorkload:
    return LatencyWorkload(tuple(args.batch_sizes), PROMPT, args.output_len, repeats=5)


def plain(args: argparse.Namespace) -> dict[str, Any]:
    with engine(args, None) as llm:
        rows = measure(llm, workload(args))
        return {"config": report.settings(llm.config), "rows": rows}


def drafting(args: argparse.Namespace, method: str, without: list[dict[str, Any]]) -> dict[str, Any]:
    """One method's figures beside those without drafts."""
    config = {"method": method, "num_speculative_tokens": args.drafts, "synthetic_acceptance_rate": args.rate}
    with engine(args, config) as llm:
        rows = measure(llm, workload(args))
        for row, base in zip(rows, without, strict=True):
            row["gain"] = round(row["tokens_per_step"] * base["interval_ms"] / row["interval_ms"], 3)
            row |= steps_of(llm, row["batch_size"], args.drafts)
            print(method, json.dumps(row), flush=True)
        return {"config": report.settings(llm.config), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="what verification costs, and what drafts gain")
    parser.add_argument("--json", required=True)
    parser.add_argument("--model", default=str(CONFIGS / "qwen3-next-12l"))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--output-len", type=int, default=384)
    parser.add_argument("--methods", nargs="*", choices=("ngram", "mtp"), default=("mtp", "ngram"))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    found: dict[str, Any] = report.provenance(args.device)
    if args.methods:
        found["plain"] = plain(args)
        print(json.dumps(found["plain"]["rows"]), flush=True)
    for method in args.methods:
        found[method] = drafting(args, method, found["plain"]["rows"])
        report.write_json(Path(args.json), found)
    report.write_json(Path(args.json), found)


if __name__ == "__main__":
    main()
