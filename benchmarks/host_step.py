"""Measure the host's work for one decode step, without a model: milliseconds by part and number of running sequences.

    python benchmarks/host_step.py --json FILE [--profile]

Scheduler, cache manager, batch builder, dispatcher and sampling inputs are those of the engine; only the device's work
is left out, and its tokens are made up. One step is in flight, as with overlap. Figures are medians of the thread's CPU
time, which other work on the machine does not lengthen; the worst step is one in which every sequence gets a page.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from weft.bench import report
from weft.cache.manager import Manager
from weft.cache.spec import CacheSpec
from weft.config import resolve
from weft.config.graph_modes import CudaGraphMode
from weft.graph.batch_descriptor import BatchDescriptor
from weft.graph.capture_sizes import decode_sizes, token_sizes
from weft.graph.dispatcher import Dispatcher
from weft.messages import ModelOutput, RowSampling, SchedulerOutput
from weft.request import Request
from weft.runner.batch_builder import BatchBuilder
from weft.runner.rows import RowTable
from weft.runner.sampling.state import SamplingState
from weft.runner.step_layout import LayoutRules
from weft.scheduler.scheduler import Scheduler

CONFIGS = Path(__file__).parent / "configs"
PROMPT, MAX_MODEL_LEN, BUDGET, CPU = 256, 4096, 8192, torch.device("cpu")


class Host:
    """The host's side of an engine with ``count`` decoding sequences."""

    def __init__(self, model: str, count: int) -> None:
        config = resolve(model=str(CONFIGS / model), device="cpu", load_format="dummy", skip_tokenizer_init=True)
        spec = CacheSpec.of(config)
        pages = 1 + count * spec.pages_for(MAX_MODEL_LEN) // 4
        slots = count + 2 if spec.has_states else 1
        manager = Manager(spec, num_pages=pages, num_slots=slots, enable_prefix_caching=False)
        self.scheduler = Scheduler(manager, max_num_seqs=count, max_num_batched_tokens=BUDGET)
        self.rows = RowTable(count, spec.pages_for(MAX_MODEL_LEN), CPU)
        self.builder = BatchBuilder(
            self.rows, LayoutRules(spec.has_states),
            page_size=spec.page_size, max_num_tokens=BUDGET, max_num_seqs=count, ends_sparse=False, device=CPU,
        )  # fmt: skip
        self.sampling = SamplingState(self.rows, config.model_config.vocab_size, CPU)
        sizes = decode_sizes(count), (), token_sizes(BUDGET, largest=4096)
        self.dispatcher = Dispatcher(CudaGraphMode.FULL, *sizes)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        rng = np.random.default_rng(0)
        for i in range(count):
            prompt = rng.integers(0, 1000, PROMPT).tolist()
            self.scheduler.add(
                Request(f"r{i}", array("I", prompt), RowSampling(temperature=1.0, top_p=0.9, seed=i), 3000)
            )

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds[name].append(time.thread_time() - start)

    def launch(self, step: SchedulerOutput) -> ModelOutput:
        """Do the host's work of ``ModelRunner.launch`` before and after the replay."""
        with self.part("rows"):
            for row in step.finished_rows:
                self.sampling.free_row(row)
            for new in step.new_requests:
                self.rows.add(new)
                self.sampling.add_row(new)
            sampled = [request for request in step.requests if request.samples]
        with self.part("layout"):
            layout = self.builder.rules.layout(step)
            shape = layout.shape
        with self.part("batch"):
            choice = self.dispatcher.choose(shape)
            padded = BatchDescriptor.decodes(choice.size, MAX_MODEL_LEN) if shape.is_decode else shape
            self.builder.build(layout, padded)
        with self.part("sampling"):
            assert not self.sampling.edited(sampled) and not self.sampling.num_logprobs(sampled)
            rows = [request.row for request in sampled]
        return ModelOutput(step.step, rows, [7] * len(rows))

    def run(self, num_steps: int) -> None:
        """Decode so many steps; whatever is left of the prompts goes first and is not timed."""
        flying: list[ModelOutput] = []
        while num_steps:
            begin = time.thread_time()
            with self.part("schedule"):
                step = self.scheduler.schedule()
            assert step is not None
            flying.append(self.launch(step))
            if len(flying) > 1:
                output = flying.pop(0)
                with self.part("update"):
                    self.scheduler.update(output)
            self.seconds["all"].append(time.thread_time() - begin)
            if step.num_tokens > len(step.requests) or len(step.requests) < self.scheduler.stats().num_running:
                self.seconds.clear()
            else:
                num_steps -= 1
        while flying:
            self.scheduler.update(flying.pop(0))


def measure(model: str, count: int, num_steps: int) -> dict[str, Any]:
    host = Host(model, count)
    gc.collect()
    gc.freeze()  # as the engine process does when it is ready
    host.run(num_steps)
    parts = {name: round(median(s) * 1e3, 4) for name, s in host.seconds.items()}
    return {"model": model, "sequences": count, "ms": parts, "worst_ms": round(max(host.seconds["all"]) * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["qwen3-0.6b", "qwen3-next-12l"])
    parser.add_argument("--sequences", type=int, nargs="*", default=[64, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of the time")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for model in args.models:
        for count in args.sequences:
            found.append(measure(model, count, args.steps))
            print(json.dumps(found[-1]), flush=True)
    if args.profile:
        host = Host(args.models[-1], args.sequences[-1])
        host.run(20)
        with cProfile.Profile() as profile:
            host.run(100)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if args.json:
        head = {"benchmark": "host_step", **report.provenance("cpu")}
        Path(args.json).write_text(json.dumps(head | {"results": found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
