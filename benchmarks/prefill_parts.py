"""Measure the gain of parts of a captured prefill: passes of a dense model with and without them, in one process.

    python benchmarks/prefill_parts.py --model qwen3-0.6b --lengths 512 1024 2048 --json FILE

The parts:

- decodes on a branch of the graph (``weft/ops/attention/paged.py``);
- gate and up with SiLU in one launch (``linear/gated_hopper.py``);
- consumers of prefill attention that share their rows (``attention/prefill_hopper.py``);
- cuBLASLt as torch's choice among the matrix libraries.

Passes with and without the parts run in turn. A batch is one prompt, or decodes and a prompt. Times are of the device,
and of the host from the launch to the end. Outputs are compared with those of the pass without the parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.decode_profile import CONFIGS, fill_caches, graph_ms
from benchmarks.prefill_profile import prefill_orders
from weft.bench import report
from weft.config import resolve
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.ops.attention import paged as attention
from weft.ops.attention import prefill_hopper as attention_prefill_hopper
from weft.ops.linear import gated_hopper as gated_linear_hopper
from weft.runner.model_runner import ModelRunner

VARIANTS = ("none", "branch", "gated", "shared", "branch gated", "branch gated shared", "branch gated lt", "none again")
NEVER = 1 << 30


@contextmanager
def parts(names: str) -> Iterator[None]:
    """In the body, passes are captured with these parts, whatever the number of rows, and without the others."""
    with ExitStack() as stack:
        for name, module, constant, with_it, without in (
            ("branch", attention, "_BRANCH_ROWS", 1, NEVER),
            ("gated", gated_linear_hopper, "LEAST_FILLED", 0, NEVER),
            ("shared", attention_prefill_hopper, "_SHARED_HEADS", NEVER, 0),
        ):
            value = with_it if name in names.split() else without
            stack.enter_context(mock.patch.object(module, constant, value))
        stack.enter_context(mock.patch.object(attention, "_BRANCH_HEADS", NEVER))
        if "lt" in names.split():
            torch.backends.cuda.preferred_blas_library("cublaslt")
            stack.callback(torch.backends.cuda.preferred_blas_library, "cublas")
        yield


def capture(runner: ModelRunner, length: int, names: str) -> torch.cuda.CUDAGraph:
    """The forward pass of so many tokens."""
    functions = runner.steps.functions
    with parts(names):
        functions.builder.send_padding(functions.mixed_shape(length))
        functions.forward(length)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            functions.forward(length)
    return graph


def mixed_orders(runner: ModelRunner, length: int, decodes: int, context: int) -> SchedulerOutput:
    """``length`` tokens: of sequences that decode at ``context``, and of one prompt."""
    pages, vocabulary = runner.spec.pages_for(context + 1), runner.config.model_config.vocab_size
    greedy, rest = RowSampling(temperature=0.0), length - decodes
    new, requests = [], []
    for r in range(decodes):
        tokens = [(r * 7919 + i * 31) % vocabulary for i in range(context + 1)]
        new.append(NewRequest(r, array("I", tokens), context + 1, greedy))
        own = list(range(1 + r * pages, 1 + (r + 1) * pages))
        requests.append(ScheduledRequest(r, context, 1, own, r + 1, True))
    new.append(NewRequest(decodes, array("I", [i * 37 % vocabulary for i in range(rest)]), rest, greedy))
    first = 1 + decodes * pages
    own = list(range(first, first + runner.spec.pages_for(rest)))
    requests.append(ScheduledRequest(decodes, 0, rest, own, decodes + 1, True))
    return SchedulerOutput(1, requests, new)


def wall_ms(replay: Callable[[], Any], repeats: int = 15) -> float:
    """Median milliseconds of the host from a launch to the end of the work."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return median(times)


def sampled_rows(hidden: Tensor, graph: torch.cuda.CUDAGraph, rows: list[int]) -> Tensor:
    """Replay the graph and return the kept hidden states of the tokens after which a token is sampled."""
    hidden.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return hidden[rows].double()


def compare(
    graphs: dict[str, torch.cuda.CUDAGraph], hidden: Tensor, rows: list[int], what: str, rounds: int
) -> dict[str, Any]:
    """Times and differences of all variants on the batch that is in the step's buffers."""
    outs = {names: sampled_rows(hidden, graph, rows) for names, graph in graphs.items()}
    ms: dict[str, list[float]] = {names: [] for names in graphs}
    wall: dict[str, list[float]] = {names: [] for names in graphs}
    for _ in range(rounds):
        for names, graph in graphs.items():
            ms[names].append(round(graph_ms(graph.replay, 20), 4))
            wall[names].append(round(wall_ms(graph.replay), 4))
    want = outs["none"]
    errors = {names: float((out - want).norm() / want.norm()) for names, out in outs.items()}
    for names in graphs:
        gained, gained_wall = (median(t[names]) - median(t["none"]) for t in (ms, wall))
        print(
            f"{what:28} {names:20} {median(ms[names]):8.4f} {gained:+.4f}  wall {median(wall[names]):8.4f} "
            f"{gained_wall:+.4f}  error {errors[names]:.1e} of {len(outs[names])} rows  {ms[names]}",
            flush=True,
        )
    return {"ms": ms, "wall_ms": wall, "errors": errors}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="'none' first")
    parser.add_argument("--mixed", type=int, nargs="*", default=[1024, 2048], help="lengths with decodes as well")
    parser.add_argument("--decodes", type=int, default=24)
    parser.add_argument("--context", type=int, default=600, help="of a decode")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    runner = ModelRunner(
        resolve(
            model=str(CONFIGS / args.model), load_format="dummy", skip_tokenizer_init=True, max_model_len=16384,
            max_num_seqs=256, device="cuda", cuda_graph_mode="FULL", piecewise_cuda_graph_tokens=args.lengths,
        )
    )  # fmt: skip
    fill_caches(runner)
    hidden = runner.steps.functions.hidden
    result: dict[str, Any] = {"benchmark": "prefill_parts", **report.provenance("cuda"), "model": args.model}
    result |= {"decodes": args.decodes, "context": args.context, "batches": []}
    for length in args.lengths:
        graphs = {names: capture(runner, length, names) for names in args.variants}
        batches = {"one prompt": prefill_orders(runner, length)}
        if length in args.mixed:
            batches["decodes and a prompt"] = mixed_orders(runner, length, args.decodes, args.context)
        for kind, orders in batches.items():
            runner.run(orders)
            rows = [*range(args.decodes), length - 1] if "decodes" in kind else [length - 1]
            row = compare(graphs, hidden, rows, f"{length} {kind}", args.rounds)
            result["batches"].append({"tokens": length, "batch": kind, **row})
            Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
