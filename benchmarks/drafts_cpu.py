"""Drafts by the bundled model's head on a CPU: tokens per second of processor time, with and without.

    python -m benchmarks.drafts_cpu --json FILE

Greedy answers to the evaluation's problems, one thread. Processor time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from weft import LLM, SamplingParams
from weft.assets import EVAL_PATH
from weft.bench import report
from weft.bench.evaluation import read_problems

BATCHES, DRAFTS = (1, 4, 24), (0, 1, 2)


def measure(batch: int, drafts: int) -> dict[str, Any]:
    """One engine: answers of up to 60 tokens, two batches of them or eight."""
    chats = [list(problem.messages) for problem in read_problems(EVAL_PATH)][: max(8, 2 * batch)]
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": batch, "enable_prefix_caching": False}
    if drafts:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    with LLM(**settings) as llm:
        llm.chat(chats[:batch], SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
        start = time.process_time()
        outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
        seconds, stats = time.process_time() - start, llm.stats()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "batch_size": batch, "drafts": drafts, "tokens_per_cpu_s": round(tokens / seconds, 1),
        "accepted": stats.spec_decode_num_accepted_tokens, "drafted": stats.spec_decode_num_draft_tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    target = report.open_json(parser.parse_args().json)
    torch.set_num_threads(1)
    rows = [measure(batch, drafts) for batch in BATCHES for drafts in DRAFTS]
    report.write_json(target, report.provenance("cpu") | {"rows": rows})
    keys = list(rows[0])
    report.table("Drafts by the head on a CPU", keys, [[str(row[key]) for key in keys] for row in rows])


if __name__ == "__main__":
    main()
