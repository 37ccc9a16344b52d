"""Where the time from the call to the first token goes on the host: parts of one request, and the device's share.

    python benchmarks/first_token.py --model qwen3-0.6b --lengths 1024 2048 8192 --json FILE

As ``weft bench prefill``, one request at a time with one new token; every part is timed where it is called, in
microseconds, medians of all requests. Parts contain one another: *launch* contains *fill* and *replay*. On a GPU *wait*
is what the host waits for the device, and *device* spans the first to the last operation of the step. With
``--device cpu`` the host's parts of a tiny model are measured without a GPU.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import dummy_engine
from weft import LLM, SamplingParams
from weft.bench import report
from weft.graph.graph_set import GraphSet
from weft.runner.batch_builder import BatchBuilder
from weft.runner.results import PendingStep
from weft.runner.step_runner import StepRunner


class Parts:
    """Seconds by part of one request; ``wrap`` makes a method one of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[torch.cuda.Event] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        setattr(owner, name, timed)

    def span_device(self, owner: Any, name: str) -> None:
        """Events of the device before and after a method."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def spanned(*args: Any, **kwargs: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = method(*args, **kwargs)
            end.record()
            self.events += [start, end]
            return result

        setattr(owner, name, spanned)

    def taken(self) -> dict[str, float]:
        """Microseconds by part since the last call."""
        found = {part: seconds * 1e6 for part, seconds in self.seconds.items()}
        if self.events:
            torch.cuda.synchronize()
            found["device"] = self.events[0].elapsed_time(self.events[-1]) * 1e3
        self.seconds.clear()
        self.events.clear()
        return found


def watch(llm: LLM, parts: Parts) -> None:
    core = llm._core
    parts.wrap(llm, "add_request", "add")
    parts.wrap(llm, "_advance", "steps")
    parts.wrap(llm, "_drain", "drain")
    parts.wrap(core.scheduler, "schedule", "schedule")
    parts.wrap(core.scheduler, "update", "update")
    parts.wrap(core._executor, "launch", "launch")
    parts.wrap(StepRunner, "prepare", "launch: rows")
    parts.wrap(BatchBuilder, "fill", "launch: fill")
    parts.wrap(BatchBuilder, "send", "launch: send")
    parts.wrap(GraphSet, "replay", "launch: replays")
    parts.wrap(PendingStep, "result", "wait")
    if llm.config.device == "cuda":
        parts.span_device(StepRunner, "launch")


def measure(llm: LLM, parts: Parts, length: int, repeats: int) -> dict[str, float]:
    rng = random.Random(length)
    top = llm.config.model_config.vocab_size - 1
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    rows = []
    for _ in range(repeats + 3):
        prompt = {"prompt_token_ids": [rng.randint(0, top) for _ in range(length)]}
        parts.taken()
        began = time.perf_counter()
        llm.generate([prompt], [params], use_tqdm=False)
        rows.append({"all": (time.perf_counter() - began) * 1e6} | parts.taken())
    return {part: round(median(row.get(part, 0.0) for row in rows[3:]), 1) for part in rows[-1]}


def main() -> None:
    parser = dummy_engine.arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    parts, rows, target = Parts(), {}, report.open_json(args.json)
    with dummy_engine.make(args, max_num_seqs=256) as llm:
        watch(llm, parts)
        for length in args.lengths:
            rows[length] = measure(llm, parts, length, args.repeats)
            print(args.model, length, rows[length], flush=True)
        report.write_json(target, dummy_engine.head("first_token", args, llm) | {"us": rows})


if __name__ == "__main__":
    main()
