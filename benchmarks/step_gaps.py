"""Where the wall time of a full queue goes: every step's time on the device, and the gaps between steps.

    python benchmarks/step_gaps.py --model qwen3-0.6b --prompts 256 --json FILE

The workload of ``weft bench throughput`` (lengths by ``--lens``) runs in one process, first without and then with
events of the device around every step. Events are recorded before the step's inputs are sent, around each graph, and
after its results are copied.

- *gap*: idle time of the device between two steps.
- *copies*: inputs and results of a step, and the work outside its graphs.
- *host*: a turn of the loop without its wait for the device.

``--budgets`` runs the queue again with other token budgets per step, no larger than the engine's. On a CPU a step runs
where it is launched, so that gaps are the host's whole time.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import dummy_engine
from weft import LLM, SamplingParams
from weft.bench import report
from weft.bench.throughput import ThroughputWorkload
from weft.graph.graph_set import GraphSet
from weft.messages import SchedulerOutput
from weft.runner.batch_builder import BatchBuilder
from weft.runner.results import PendingStep
from weft.runner.step_runner import StepRunner

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, 1024)
"""Upper ends of the batch sizes that are told apart."""


@dataclass(slots=True)
class Moment:
    """A moment on the device; on a CPU of the host."""

    event: torch.cuda.Event | None
    at: float

    @staticmethod
    def now(on_gpu: bool) -> Moment:
        event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if event is not None:
            event.record()
        return Moment(event, time.perf_counter())

    def until(self, later: Moment) -> float:
        """Milliseconds."""
        if self.event is None or later.event is None:
            return (later.at - self.at) * 1e3
        return self.event.elapsed_time(later.event)


@dataclass(slots=True)
class Step:
    """One step: the batch, the moments, and milliseconds of the host's turn that launched it."""

    num_decodes: int
    num_prefill_tokens: int
    moments: list[Moment] = field(default_factory=list)
    graphs: list[Moment] = field(default_factory=list)
    mode: str = ""
    num_padding: int = 0
    turn_ms: float = 0.0
    wait_ms: float = 0.0

    @property
    def kind(self) -> str:
        if not self.num_prefill_tokens:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    @property
    def bucket(self) -> str:
        size = self.num_decodes if self.kind == "decode" else 0
        return f"{next(top for top in BUCKETS if top >= size):5}" if size else ""

    def figures(self, before: Step | None) -> dict[str, float]:
        """Milliseconds and rows."""
        device = self.moments[0].until(self.moments[-1])
        graphs = sum(a.until(b) for a, b in zip(self.graphs[::2], self.graphs[1::2], strict=True))
        gap = max(0.0, before.moments[-1].until(self.moments[0])) if before is not None else 0.0
        return {
            "device_ms": device, "gap_ms": gap, "copies_ms": device - graphs if self.graphs else 0.0,
            "host_ms": self.turn_ms - self.wait_ms, "wait_ms": self.wait_ms,
            "rows": self.num_decodes + self.num_prefill_tokens, "padding_rows": self.num_padding,
        }  # fmt: skip


class Trace:
    """Steps of one engine, while ``on``."""

    def __init__(self, llm: LLM) -> None:
        self.on, self._wait = False, 0.0
        self.steps: list[Step] = []
        self._on_gpu = llm.config.device == "cuda"
        self._wrap(StepRunner, "launch", self._launch)
        self._wrap(BatchBuilder, "send", self._send)
        self._wrap(GraphSet, "replay", self._replay)
        self._wrap(PendingStep, "result", self._result)
        self._wrap(llm, "_advance", self._advance)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any) -> Any:
            return around(functools.partial(method, *args), *args) if self.on else method(*args)

        setattr(owner, name, wrapped)

    def _launch(self, method: Callable[[], PendingStep], runner: object, output: SchedulerOutput, *_: Any) -> object:
        decodes = sum(r.num_decode_tokens for r in output.requests)
        self.steps.append(step := Step(decodes, output.num_tokens - decodes))
        pending = method()
        step.moments.append(Moment.now(self._on_gpu))
        step.mode, step.num_padding = pending.mode, pending.num_padding_tokens
        return pending

    def _send(self, method: Callable[[], None], *_: Any) -> None:
        self.steps[-1].moments.append(Moment.now(self._on_gpu))
        method()

    def _replay(self, method: Callable[[], object], *_: Any) -> object:
        graphs = self.steps[-1].graphs
        graphs.append(Moment.now(self._on_gpu))
        result = method()
        graphs.append(Moment.now(self._on_gpu))
        return result

    def _result(self, method: Callable[[], object], *_: Any) -> object:
        began = time.perf_counter()
        result = method()
        self._wait += time.perf_counter() - began
        return result

    def _advance(self, method: Callable[[], object], *_: Any) -> object:
        before, began, self._wait = len(self.steps), time.perf_counter(), 0.0
        result = method()
        for step in self.steps[before:]:
            step.turn_ms, step.wait_ms = (time.perf_counter() - began) * 1e3, self._wait * 1e3
        return result


def groups(steps: list[Step]) -> list[dict[str, Any]]:
    """Sums and medians by kind and batch size."""
    found: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    for before, step in zip([None, *steps], steps, strict=False):
        found[step.kind, step.bucket, step.mode].append(step.figures(before))
    rows = []
    for (kind, bucket, mode), each in sorted(found.items()):
        row: dict[str, Any] = {"kind": kind, "batch_to": bucket.strip(), "mode": mode, "steps": len(each)}
        for name in each[0]:
            values = [figures[name] for figures in each]
            row[name] = round(sum(values), 3)
            if name.endswith("_ms"):
                row[f"{name}_median"] = round(median(values), 4)
        rows.append(row)
    return rows


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def measure(llm: LLM, trace: Trace, workload: ThroughputWorkload, repeats: int) -> dict[str, Any]:
    """One queue: seconds without events, and a run with them."""
    prompts, lengths = workload.requests(llm.config.model_config.vocab_size)
    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    run(llm, prompts[:8], [SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)] * len(prompts[:8]))
    seconds = [round(run(llm, prompts, params), 4) for _ in range(repeats)]
    trace.on, trace.steps = True, []
    traced = run(llm, prompts, params)
    trace.on = False
    if llm.config.device == "cuda":
        torch.cuda.synchronize()
    rows = groups(trace.steps)
    totals = {name: round(sum(row[name] for row in rows), 3) for name in rows[0] if isinstance(rows[0][name], float)
              and not name.endswith("_median")}  # fmt: skip
    admitted = next((i for i, step in enumerate(trace.steps) if step.num_decodes == workload.num_prompts), None)
    return {
        "num_prompts": len(prompts), "num_prompt_tokens": sum(map(len, prompts)), "num_output_tokens": sum(lengths),
        "budget": llm._core.scheduler.max_num_batched_tokens, "seconds": seconds, "traced_seconds": round(traced, 4),
        "output_tokens_per_s": round(sum(lengths) / median(seconds), 1), "steps": len(trace.steps),
        "first_step_with_all_decoding": admitted, "ms": totals, "groups": rows,
        "prefills": [
            [step.kind, step.num_decodes, step.num_prefill_tokens, step.num_padding, step.mode]
            + [round(value, 3) for value in (step.figures(None)["device_ms"], step.turn_ms - step.wait_ms)]
            for step in trace.steps if step.num_prefill_tokens
        ],
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print({name: value for name, value in result.items() if name not in ("groups", "prefills")})
    names = ("device_ms", "gap_ms", "copies_ms", "host_ms", "wait_ms")
    print(f"{'kind':8} {'to':>5} {'mode':9} {'steps':>5} {'rows':>7} {'padding':>7} " + " ".join(
        f"{name[:-3]:>9} {'median':>8}" for name in names))  # fmt: skip
    for row in result["groups"]:
        print(f"{row['kind']:8} {row['batch_to']:>5} {row['mode']:9} {row['steps']:5} {row['rows']:7.0f} "
              f"{row['padding_rows']:7.0f} " + " ".join(f"{row[n]:9.2f} {row[n + '_median']:8.3f}" for n in names),
              flush=True)  # fmt: skip


def main() -> None:
    parser = dummy_engine.arguments(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[256])
    parser.add_argument("--lens", type=int, nargs=2, default=[100, 1024], help="of prompts and of outputs")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="token budgets per step to run again with")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    target = report.open_json(args.json)
    found: list[dict[str, Any]] = []
    with dummy_engine.make(args, max_num_seqs=max(args.prompts)) as llm:
        trace, scheduler = Trace(llm), llm._core.scheduler
        head = dummy_engine.head("step_gaps", args, llm)
        for count in args.prompts:
            lens = tuple(args.lens)
            workload = ThroughputWorkload(num_prompts=count, prompt_len=lens, output_len=lens)
            for budget in [scheduler.max_num_batched_tokens, *args.budgets]:
                before, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, budget
                found.append(measure(llm, trace, workload, args.repeats))
                scheduler.max_num_batched_tokens = before
                show(found[-1])
                report.write_json(target, head | {"results": found})


if __name__ == "__main__":
    main()
