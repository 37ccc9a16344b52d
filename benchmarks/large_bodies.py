"""Large bodies, piece by piece, in milliseconds of processor time: ``python -m benchmarks.large_bodies --json FILE``.

``event loop``: nobody else is served meanwhile, so this bounds a stream's pause. ``thread``: others go on, except where
a library keeps the interpreter lock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from weft.bench import report
from weft.config import resolve
from weft.engine.inputs import InputProcessor
from weft.errors import RequestError
from weft.platforms.cpu import cpu_name
from weft.server.protocol import BodyReader, CompletionRequest, DetokenizeRequest
from weft.text.tokenizer import Tokenizer

NUM_IDS = 1_500_000


def cost_ms(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Lowest and highest of some runs."""
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        with contextlib.suppress(RequestError):
            work()
        found.append((time.thread_time() - began) * 1e3)
    return {"lowest": round(min(found), 1), "highest": round(max(found), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    ids = [100 + i % 1000 for i in range(NUM_IDS)]
    reader, config = BodyReader(strict=False), resolve(device="cpu")
    tokenizer = Tokenizer.load(config.tokenizer_path)
    inputs = InputProcessor(config, tokenizer, 4096)
    tokens, prompt = json.dumps({"tokens": ids}).encode(), json.dumps({"prompt": ids}).encode()
    work: dict[str, Callable[[], Any]] = {
        "event loop: reading /detokenize": lambda: reader.read(tokens, DetokenizeRequest),
        "event loop: reading /v1/completions": lambda: reader.read(prompt, CompletionRequest),
        "thread: checking the prompt": lambda: inputs.prepare_prompt(ids),
        "thread: decoding": lambda: tokenizer.decode(ids, skip_special_tokens=False),
    }
    figures = {"processor": cpu_name(), "load_average": os.getloadavg()[0]} | report.origin()
    figures |= {"ids": NUM_IDS, "bytes": len(prompt)}
    figures["processor_ms"] = {name: cost_ms(one, args.repeats) for name, one in work.items()}
    print(json.dumps(figures["processor_ms"], indent=1))
    if args.json:
        report.write_json(report.open_json(args.json), figures)


if __name__ == "__main__":
    main()
