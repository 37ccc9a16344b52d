"""Calls of Python functions, and of C functions from Weft's code, in one decode step on the host: a count, no time.

    python benchmarks/host_calls.py --json FILE [--root FOLDER] [--batch 4]

A tiny model on the CPU with emulated graphs and overlap decodes a few steps under ``sys.setprofile``. Not counted is
what a GPU's graph replaces (``ops``, ``layers``, ``models``) and the emulator. ``--root``: another checkout of Weft, to
compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

STEPS = 16
LEFT_OUT = ("graph/graph.py", "ops/", "layers/", "models/")


def count(batch: int) -> dict[str, float]:
    """Calls per step by file and function."""
    from tests.tiny import make_checkpoint
    from weft import LLM, SamplingParams

    folder = make_checkpoint("Qwen3NextForCausalLM", Path(tempfile.mkdtemp()))
    settings: dict[str, Any] = {"cuda_graph_mode": "FULL_DECODE_ONLY", "cuda_graph_bs": [batch], "enable_overlap": True}
    found: Counter[str] = Counter()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        _, is_weft, path = frame.f_code.co_filename.rpartition("/weft/")
        if event in ("call", "c_call") and is_weft and not path.startswith(LEFT_OUT):
            name = frame.f_code.co_name if event == "call" else f"calls {argument.__name__}"
            found[f"{path}: {name}"] += 1

    with LLM(str(folder), device="cpu", max_num_seqs=batch, skip_tokenizer_init=True, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8 + 2 * STEPS, ignore_eos=True, detokenize=False)
        for i in range(batch):
            llm.add_request({"prompt_token_ids": [5 + i] * 9}, params)
        for _ in range(8):
            llm._core.step()
        sys.setprofile(notice)
        for _ in range(STEPS):
            llm._core.step()
        sys.setprofile(None)
        while llm._core.has_work:
            llm._core.step()
    return {name: number / STEPS for name, number in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description="calls in one decode step on the host")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    target, root = args.json.resolve(), args.root.resolve()
    sys.path.insert(0, str(root))
    os.chdir(root)
    from weft.bench import report

    by_function = count(args.batch)
    result = {**report.provenance("cpu"), "batch": args.batch, "calls_per_step": round(sum(by_function.values()), 2)}
    target.write_text(json.dumps(result | {"by_function": by_function}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
