"""Decoding steps of one model without ``deterministic``, with it, and with other orders of attention's sums.

    python -m benchmarks.deterministic_orders --model qwen3-0.6b --json FILE

Milliseconds of a graph's replay by number of sequences, each with 1,088 tokens. An order is the tokens of attention's
shortest split. The tiles of a split are added one after the other, so a step of one sequence may prefer short splits.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from typing import Any

import torch

from benchmarks.decode_profile import CONFIGS, decode_orders, fill_caches, graph_ms
from weft.bench import report
from weft.config import resolve
from weft.ops.attention import paged
from weft.runner.model_runner import ModelRunner

SEQUENCES, CONTEXT = (1, 8, 32), 1088
SPLITS = (256, 128, 64)
"""Tokens. The first one is in use."""


def steps(model: str, deterministic: bool) -> dict[str, float]:
    config = resolve(
        model=str(CONFIGS / model), load_format="dummy", skip_tokenizer_init=True, max_model_len=16384, device="cuda",
        max_num_seqs=max(SEQUENCES), cuda_graph_mode="FULL_DECODE_ONLY", cuda_graph_bs=list(SEQUENCES),
        num_kv_pages=6000, deterministic=deterministic,
    )  # fmt: skip
    runner = ModelRunner(config)
    fill_caches(runner)
    times = {}
    for count in SEQUENCES:
        runner.run(decode_orders(runner, count, CONTEXT))
        assert runner.graphs.decode is not None
        times[str(count)] = graph_ms(partial(runner.graphs.decode.replay, count, count))
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="of benchmarks/configs")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    target, rows = report.open_json(args.json), list[dict[str, Any]]()
    for split in (None, *SPLITS):
        if split is not None:
            paged._FIXED_SPLIT = split
        rows.append({"split": split, "step_ms": steps(args.model, split is not None)})
        print(args.model, rows[-1], flush=True)
        head = {"benchmark": "deterministic_orders", "model": args.model, "context": CONTEXT}
        report.write_json(target, head | report.provenance("cuda") | {"rows": rows})


if __name__ == "__main__":
    main()
