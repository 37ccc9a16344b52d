"""Decode latency: milliseconds per step at a given batch size.

Job: time batches of random prompts that are submitted together. Owns: the method below. Does not know: flags, files.

Method: every prompt has ``prompt_len`` random tokens; greedy, end-of-sequence ignored. A step's time is
(median time for ``output_len`` new tokens - median time for 1) / (output_len - 1), so that prefill cancels out. Beside
it stands the median interval between two consecutive steps in which the whole batch decoded.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class LatencyWorkload:
    """What is run. ``temperature`` 0 is greedy."""

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    prompt_len: int = 1024
    output_len: int = 128
    temperature: float = 0.0
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, timed: from the first request queued to the last token known; intervals of whole-batch decode steps."""

    total_s: float
    intervals_s: list[float]


def measure(llm: LLM, workload: LatencyWorkload) -> list[dict[str, Any]]:
    """Figures per batch size, in milliseconds: medians, and every repeat."""
    return [_measure_batch(llm, workload, batch_size) for batch_size in workload.batch_sizes]


def _measure_batch(llm: LLM, workload: LatencyWorkload, batch_size: int) -> dict[str, Any]:
    rng = random.Random(workload.seed)
    top = llm.config.model_config.vocab_size - 1
    prompts = [[rng.randint(0, top) for _ in range(workload.prompt_len)] for _ in range(batch_size)]
    for output_len in (1, workload.output_len):  # warm-up
        run_batch(llm, prompts, output_len, workload.temperature)
    short = [run_batch(llm, prompts, 1, workload.temperature) for _ in range(workload.repeats)]
    long = [run_batch(llm, prompts, workload.output_len, workload.temperature) for _ in range(workload.repeats)]
    prefill_s, total_s = median(r.total_s for r in short), median(r.total_s for r in long)
    step_s = (total_s - prefill_s) / (workload.output_len - 1)
    intervals = [interval for run in long for interval in run.intervals_s]
    return {
        "batch_size": batch_size,
        "step_ms": _ms(step_s),
        "interval_ms": _ms(median(intervals)) if intervals else None,
        "tokens_per_s": round(batch_size / step_s, 1),
        "one_token_ms": _ms(prefill_s),
        "repeats": {
            "one_token_ms": [_ms(r.total_s) for r in short],
            "all_tokens_ms": [_ms(r.total_s) for r in long],
            "interval_ms": [_ms(median(r.intervals_s)) if r.intervals_s else None for r in long],
        },
    }


def run_batch(llm: LLM, prompts: list[list[int]], output_len: int, temperature: float) -> Run:
    """Run ``prompts`` together, ``output_len`` tokens each."""
    params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for prompt in prompts:
        llm.add_request(prompt, params)
    intervals: list[float] = []
    previous: float | None = None
    num_tokens = 0
    while not llm.is_finished():
        outputs = llm.step()
        now = time.perf_counter()
        whole_batch = len(outputs) == len(prompts)
        if previous is not None and whole_batch:
            intervals.append(now - previous)
        previous = now if whole_batch else None
        num_tokens += sum(len(o.outputs[0].token_ids) for o in outputs if o.finished)
    assert num_tokens == output_len * len(prompts), "a request ended early; its time means nothing"
    return Run(time.perf_counter() - start, intervals)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
