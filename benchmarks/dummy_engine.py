"""An engine with dummy weights in the benchmark's own process: arguments, settings, and what a result says of both."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from weft import LLM
from weft.bench import report

CONFIGS = Path(__file__).parent / "configs"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows which engine to make (``make``) and where to write."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="one of benchmarks/configs, or a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--settings", default="{}", help="JSON of further engine settings")
    parser.add_argument("--json", required=True)
    return parser


def make(args: argparse.Namespace, max_num_seqs: int) -> LLM:
    """The engine: no tokenizer, no prefix cache, a context of 16,384 tokens, else defaults and ``--settings``."""
    folder = CONFIGS / args.model if (CONFIGS / args.model).is_dir() else Path(args.model)
    settings: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384, "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False, "device": args.device,
    }  # fmt: skip
    return LLM(str(folder), **(settings | json.loads(args.settings)))


def head(benchmark: str, args: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """Return the head of a result file: benchmark, versions and command, model, settings."""
    found = {"benchmark": benchmark, **report.provenance(llm.config.device), "model": args.model}
    return found | {"config": report.settings(llm.config)}
