"""Times of a step with drafts as a verification and as a short prefill.

    python benchmarks/verification.py --json FILE [--models kimi-linear-12l:ngram qwen4-exp-12l:mtp] [--drafts 1 3]
                                      [--batches 1 8 32] [--device cuda]

Dummy weights; every draft is accepted with probability 0.8, whatever is sampled. Milliseconds are medians between two
steps in which the whole batch got tokens, host included: verifications follow one another, prefills wait for results.
``decode`` is an engine that verifies, with drafts switched off.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.speculation import CONFIGS, step_ms
from weft import LLM
from weft.bench import report
from weft.config.model import ModelConfig

WAYS = {"verify": True, "prefill": False}


@contextmanager
def opened(args: argparse.Namespace, model: str, method: str, drafts: int, verifies: bool) -> Iterator[LLM]:
    """An engine whose drafts run as verifications, or as prefills."""
    sizes = sorted({n * tokens for n in args.batches for tokens in (1, 1 + drafts)} | {512})
    config = {"method": method, "num_speculative_tokens": drafts, "synthetic_acceptance_rate": 0.8}
    settings: dict[str, Any] = {"cuda_graph_bs": args.batches, "piecewise_cuda_graph_tokens": sizes}
    gc.collect()
    with patch.object(ModelConfig, "verifies", PropertyMock(return_value=verifies)), LLM(
        str(CONFIGS / model), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        device=args.device, max_num_seqs=max(args.batches), max_model_len=4096, speculative_config=config,
        **settings if args.device == "cuda" else {},
    ) as llm:  # fmt: skip
        yield llm


def rows_of(args: argparse.Namespace, model: str, method: str, drafts: int) -> list[dict[str, Any]]:
    """Both ways at every batch size."""
    rows = [{"model": model, "method": method, "drafts": drafts, "batch": batch} for batch in args.batches]
    for way, verifies in WAYS.items():
        with opened(args, model, method, drafts, verifies) as llm:
            planner = llm._core.scheduler.drafts
            assert planner is not None
            for row in rows:
                counts = {"decode": 0} if verifies else {}
                for name, count in (counts | {way: drafts}).items():
                    planner.max_drafts = count
                    found = step_ms(llm, row["batch"])
                    row |= {f"{name}_ms": found["ms"], f"{name}_modes": found["modes"]}
    for row in rows:
        row["prefill_over_verify"] = round(row["prefill_ms"] / row["verify_ms"], 3)
        shown = ("model", "method", "drafts", "batch", "decode_ms", "verify_ms", "prefill_ms", "prefill_over_verify")
        print(*(row[name] for name in shown), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="a step with drafts as a verification, and as a prefill")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["kimi-linear-12l:ngram", "qwen4-exp-12l:mtp"])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    result: dict[str, Any] = {**report.provenance(args.device), "rows": []}
    for name in args.models:
        model, method = name.split(":")
        for drafts in args.drafts:
            result["rows"] += rows_of(args, model, method, drafts)
            report.write_json(args.json, result)


if __name__ == "__main__":
    main()
